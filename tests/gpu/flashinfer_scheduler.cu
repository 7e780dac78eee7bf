// Runs FlashInfer's host-side attention schedulers without a GPU and prints their plans; see record_plans.py.
//
// FlashInfer's planners ask the CUDA runtime three things about the device and copy the plan to it. Here the case answers
// instead, and the copy goes nowhere.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <vector>

static int sm_count = 132;

static cudaError_t device_of_case(int* device) { return *device = 0, cudaSuccess; }

static cudaError_t attribute_of_case(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = sm_count; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

static cudaError_t copy_nothing(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) { return cudaSuccess; }

#define cudaGetDevice device_of_case
#define cudaDeviceGetAttribute attribute_of_case
#define cudaMemcpyAsync copy_nothing
#include <flashinfer/attention/scheduler.cuh>

static std::vector<char> workspace(64 << 20);

template <typename T>
static void print(const char* name, int64_t offset, size_t count) {
  const T* values = reinterpret_cast<const T*>(workspace.data() + offset);
  std::printf(", \"%s\": [", name);
  for (size_t i = 0; i < count; ++i) std::printf(i ? ",%d" : "%d", int(values[i]));
  std::printf("]");
}

static void print_info(const std::vector<int64_t>& info) {
  std::printf("{\"info\": [");
  for (size_t i = 0; i < info.size(); ++i) std::printf(i ? ",%ld" : "%ld", long(info[i]));
  std::printf("]");
}

struct Case {
  int fa3, rows, heads, kv_heads, head_dim, page_size, graph, fixed_pages, no_split, uniform, causal, total_rows;
  std::vector<int> query_indptr, page_indptr, lengths;
};

static bool read(Case& c) {
  if (!(std::cin >> c.fa3 >> sm_count >> c.heads >> c.kv_heads >> c.head_dim >> c.page_size >> c.graph >>
        c.fixed_pages >> c.no_split >> c.uniform >> c.causal >> c.total_rows >> c.rows))
    return false;
  c.query_indptr.assign(1, 0), c.page_indptr.assign(1, 0), c.lengths.clear();
  for (int i = 0; i < c.rows; ++i) {
    int queries, length;
    std::cin >> queries >> length;
    c.query_indptr.push_back(c.query_indptr.back() + queries);
    c.page_indptr.push_back(c.page_indptr.back() + (length + c.page_size - 1) / c.page_size);
    c.lengths.push_back(length);
  }
  return true;
}

static void fa2(Case& c) {
  flashinfer::PrefillPlanInfo info;
  size_t floats = 0, ints = 0;
  // Only offsets are computed from it.
  void* const partials = reinterpret_cast<void*>(size_t(1) << 40);
  if (flashinfer::PrefillPlanImpl<true, int>(
          floats, ints, partials, size_t(1) << 40, workspace.data(), workspace.data(), workspace.size(), info,
          c.query_indptr.data(), c.page_indptr.data(), c.total_rows, c.rows, c.heads, c.kv_heads, c.head_dim,
          c.head_dim, c.page_size, c.graph, 2, -1, c.fixed_pages, c.no_split, 0, c.uniform, nullptr) != cudaSuccess)
    std::exit(1);
  // Without split-KV nothing says how many tiles are valid, but then the grid is exact.
  size_t tiles = info.padded_batch_size;
  if (info.split_kv) {
    const bool* valid = reinterpret_cast<const bool*>(workspace.data() + info.block_valid_mask_offset);
    tiles = std::count(valid, valid + info.padded_batch_size, true);
  }
  print_info(info.ToVector());
  std::printf(", \"float_bytes\": %zu, \"int_bytes\": %zu, \"tiles\": %zu", floats, ints, tiles);
  print<int>("request_indices", info.request_indices_offset, tiles);
  print<int>("qo_tile_indices", info.qo_tile_indices_offset, tiles);
  print<int>("kv_tile_indices", info.kv_tile_indices_offset, tiles);
  print<int>("o_indptr", info.o_indptr_offset, c.rows + 1);
  print<int>("kv_chunk_size", info.kv_chunk_size_ptr_offset, 1);
  if (info.split_kv) print<int>("merge_indptr", info.merge_indptr_offset, c.query_indptr.back() + 1);
  std::printf("}\n");
}

static void fa3(Case& c) {
  flashinfer::PrefillPlanSM90Info info;
  if (flashinfer::PrefillSM90Plan<int>(nullptr, 0, workspace.data(), workspace.data(), workspace.size(), info,
                                       c.query_indptr.data(), c.page_indptr.data(), c.lengths.data(), c.total_rows,
                                       c.rows, c.heads, c.kv_heads, c.head_dim, c.head_dim, c.page_size, c.causal,
                                       c.graph, 2, nullptr) != cudaSuccess)
    std::exit(1);
  const size_t works = reinterpret_cast<const int*>(workspace.data() + info.work_indptr_offset)[sm_count];
  print_info(info.ToVector());
  print<int>("work_indptr", info.work_indptr_offset, sm_count + 1);
  print<int>("qo_tile_indices", info.qo_tile_indices_offset, works);
  print<int>("head_indices", info.head_indices_offset, works);
  print<int>("batch_indices", info.batch_indices_offset, works);
  print<int>("qo_indptr", info.qo_indptr_offset, works);
  print<int>("kv_indptr", info.kv_indptr_offset, works);
  print<int>("qo_lens", info.qo_len_offset, works);
  print<int>("kv_lens", info.kv_len_offset, works);
  std::printf("}\n");
}

int main() {
  Case c;
  while (read(c)) c.fa3 ? fa3(c) : fa2(c);
}
