"""The CUDA lane's executor on a CPU: its kernels in Triton's interpreter, its attention in plain torch."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tests.interpreter  # noqa: F401
from engine.cuda.adjust import LogitsAdjuster
from engine.cuda.arena import DeviceArena
from engine.cuda.attention_plan import StepRows
from engine.cuda.decoder import CudaDecoder, DecoderParts, Ops, TorchOps, rope_rows
from engine.cuda.executor import CudaExecutor, ExecutorParts, reserve_logits
from engine.cuda.graphs import DecodeGraphs, Work
from engine.cuda.inputs import StepInputs
from engine.cuda.logprobs import DeviceLogprobs
from engine.cuda.sampling import DeviceSampler
from engine.kernels.rope_append import rope_append
from engine.kernels.step_head import write_step
from engine.ladder import Ladder
from engine.messages import Logprobs
from engine.models.config import load_model_config
from engine.models.decoder import DecoderWeights
from engine.models.weights import load_weights
from engine.plan import PlanCapacity
from kv.geometry import KvGeometry
from tests import golden


class KernelOps(TorchOps):
    """Plain torch, but for this project's own kernel."""

    def __init__(self) -> None:
        self.rope_append = rope_append


class GatheringAttention:
    """Reads the page lists that the head-of-step kernel wrote, row by row."""

    def __init__(self, kv: Tensor, inputs: StepInputs) -> None:
        self.kv = kv
        self.inputs = inputs

    variant = None

    def begin(self, rows: StepRows, bucket: int | None = None, *, always_split: bool = False) -> None:
        """The page lists say everything."""

    def probes(self, bucket: int, *, always_split: bool = False) -> list[StepRows]:
        none = np.zeros(0, np.int64)
        return [StepRows(np.ones(bucket, np.int64), none, none)]

    def __call__(self, layer: int, queries: Tensor, out: Tensor) -> None:
        device, rows = self.inputs.device, self.inputs.rows
        page_ends = device["page_indptr"][: rows + 1].tolist()
        ends = self.inputs.staged["query_indptr"][: rows + 1].tolist()
        page_size = self.kv.shape[3]
        for row, last in enumerate(device["last_page_len"][:rows].tolist()):
            listed = device["page_indices"][page_ends[row] : page_ends[row + 1]].long()
            length = (len(listed) - 1) * page_size + last
            keys, values = (self.kv[listed, layer, kind].flatten(0, 1)[:length].transpose(0, 1) for kind in (0, 1))
            count = ends[row + 1] - ends[row]
            mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            asked = queries[ends[row] : ends[row + 1]].transpose(0, 1)
            got = F.scaled_dot_product_attention(asked[None], keys[None], values[None], attn_mask=mask, enable_gqa=True)
            out[ends[row] : ends[row + 1]] = got[0].transpose(0, 1)


def cuda_lane_on_cpu(
    directory: Path,
    page_size: int = 16,
    *,
    pages: int = 128,
    max_step_tokens: int = 256,
    ops: Ops | None = None,
    buckets: str | None = None,
) -> SimpleNamespace:
    """What `golden.Driver` wants of a lane: an executor in float32 and a geometry.

    With `buckets`, decode steps are recorded and replayed in them, and in one of 8 rows; `reruns` counts the replays.
    """
    model = load_model_config(directory)
    device, dtype = torch.device("cpu"), torch.float32
    geometry = KvGeometry(page_size, model.layers, model.kv_heads, model.head_dim, "float32")
    capacity = PlanCapacity(8, max_step_tokens, 1024, page_size, model.heads, model.kv_heads, model.head_dim)
    weights = DecoderWeights.fuse(model, load_weights(directory, model, dtype, device))
    arena = DeviceArena(device)
    reserve_logits(arena, capacity, model.vocab_size, model.hidden_size, dtype)
    CudaDecoder.reserve(arena, model, capacity.max_step_tokens, dtype)
    arena.allocate()
    kv = torch.zeros((pages, *geometry.page_shape))
    decoder = CudaDecoder(
        DecoderParts(model, weights, kv, arena, ops or TorchOps(), rope_rows(model, capacity.max_context, device))
    )
    inputs = StepInputs(capacity, device, write_step)
    parts = ExecutorParts(capacity, pages, inputs, GatheringAttention(kv, inputs), decoder, arena)
    executor, reruns = CudaExecutor(parts), Reruns(inputs)
    if buckets is not None:
        executor.capture(DecodeGraphs(Ladder.of(8, buckets), reruns))
    return SimpleNamespace(executor=executor, geometry=geometry, kv=kv, reruns=reruns)


def plain_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rows get their likeliest token, and nothing of what they may ask for beside it: those kernels take seconds
    in the interpreter, and are held elsewhere.
    """

    def choose(self: DeviceSampler, logits: Tensor, inputs: StepInputs, rows: slice, out: Tensor) -> None:
        out.copy_(logits.argmax(-1))

    def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(DeviceSampler, "choose", choose)
    monkeypatch.setattr(DeviceLogprobs, "read", nothing)
    monkeypatch.setattr(DeviceLogprobs, "read_now", lambda *_: Logprobs(b""))
    monkeypatch.setattr(LogitsAdjuster, "adjust", nothing)
    monkeypatch.setattr(LogitsAdjuster, "keep", nothing)


class Reruns:
    """`engine.cuda.graphs.Recorder` without a GPU: a replay runs what was recorded, on the row count it had then."""

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        self.replayed = 0

    def record(self, work: Work) -> "Rerun":
        work()
        return Rerun(self, work, self.inputs.rows)


@dataclass(frozen=True)
class Rerun:
    """A recorded step."""

    of: Reruns
    work: Work
    rows: int

    def replay(self) -> None:
        self.of.replayed += 1
        self.of.inputs.rows = self.of.inputs.tokens = self.rows
        self.work()


class CudaDriver(golden.Driver):
    """Drives a `CudaExecutor`."""

    def force(self, row: golden.Row, token: int) -> None:
        self.executor.inputs.device["last_tokens"][row.slot] = token
