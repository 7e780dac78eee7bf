"""Memory that comes after its addresses: a graph is captured over a nearly empty range, then the rest is mapped.

python -m tests.gpu.check_vmm
"""

import time

import torch

from engine.cuda.driver import DriverError
from engine.cuda.vmm import CudaVirtualMemory, DeviceRange
from tests.gpu.harness import Results

MIB = 1 << 20
PAGE = 9 * MIB // 4
"""Bytes of a page, those of Qwen3-4B at page size 16: no multiple of the granule."""


def check_graph(results: Results, memory: CudaVirtualMemory, device: torch.device) -> None:
    """A captured kernel reads and writes pages that got their memory after the capture."""
    _, total = torch.cuda.mem_get_info(device)
    pages = total // PAGE
    space = DeviceRange(memory, pages * PAGE)
    space.map(PAGE)
    kv = space.tensor((pages, PAGE // 2), torch.bfloat16)
    kv[0].zero_()
    wanted = torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.zeros(1, PAGE // 2, dtype=torch.bfloat16, device=device)
    graph = torch.cuda.CUDAGraph()
    torch.index_select(kv, 0, wanted, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.index_select(kv, 0, wanted, out=out)
        kv.index_add_(0, wanted, out)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    began = time.perf_counter()
    usable = (free - 512 * MIB) // PAGE
    space.map(usable * PAGE)
    seconds = time.perf_counter() - began
    left, _ = torch.cuda.mem_get_info(device)
    began = time.perf_counter()
    kv[:usable].zero_()
    torch.cuda.synchronize()
    zeroed = time.perf_counter() - began
    right = []
    for page in (0, 1, usable // 2, usable - 1):
        kv[page].fill_(3)
        wanted.fill_(page)
        graph.replay()
        right.append(bool((out == 3).all()) and bool((kv[page] == 6).all()))
    results.emit(
        "a graph of before reads and writes what was mapped after",
        ok=all(right),
        right=right,
        usable_pages=usable,
        of_pages=pages,
        map_s=seconds,
        zero_s=zeroed,
        free_error_mib=(free - left - (space.mapped - memory.granularity * -(-PAGE // memory.granularity))) / MIB,
    )
    del graph, kv
    space.close()
    after, _ = torch.cuda.mem_get_info(device)
    results.emit("all memory comes back", ok=after >= free, before_mib=free / MIB, after_mib=after / MIB)


def check_refusal(results: Results, memory: CudaVirtualMemory, device: torch.device) -> None:
    """More than there is is refused, and nothing is lost by it."""
    free, total = torch.cuda.mem_get_info(device)
    space = DeviceRange(memory, 2 * total)
    space.map(1)
    try:
        space.map(total + 64 * MIB)
        text = ""
    except DriverError as error:
        text = str(error)
    mapped = space.mapped
    space.close()
    after, _ = torch.cuda.mem_get_info(device)
    results.emit("too much is refused", ok="out of memory" in text and mapped == memory.granularity, error=text)
    results.emit("a refusal loses nothing", ok=after == free, lost_mib=(free - after) / MIB)


def main() -> None:
    """Run everything."""
    results = Results("vmm")
    device = torch.device("cuda", 0)
    with results.part("driver"):
        memory = CudaVirtualMemory(device)
        results.emit("granularity", bytes=memory.granularity, ok=memory.granularity > 0)
        for check in (check_graph, check_refusal):
            with results.part(check.__name__):
                check(results, memory, device)
    results.emit("summary", failed=results.failed)


if __name__ == "__main__":
    main()
