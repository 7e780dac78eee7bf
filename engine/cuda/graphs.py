"""Decode steps captured as CUDA graphs, two for each bucket and each way to compute its attention.

A graph replays kernels with the arguments of its capture: addresses, grids and numbers. So it may only be replayed for
a step that would launch exactly these, which is what `GraphKey` says, and everything else that a step brings must have
been written to the captured addresses before: the attention plan and the staged inputs.
"""

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from engine.ladder import Ladder

Work = Callable[[], None]
"""Launches a step's kernels, all of them on the current stream, without waiting and without asking the device."""


KINDS = (True, False)
"""Values of `GraphKey.asks`, in the order of capture: what needs most comes first."""


class GraphKey(NamedTuple):
    """All that the launches of a decode step depend on beside memory at fixed addresses."""

    bucket: int
    attention: Hashable
    """Kernel, split and grid of the attention, as the step's plan has them."""
    asks: bool
    """Penalties, suppressed tokens and log probabilities are computed for all rows, and change those that ask."""


class GraphError(ValueError):
    """A step cannot be captured; one line for the operator."""


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Queue the step on the current stream."""
        ...


class Recorder(Protocol):
    """Makes graphs."""

    def record(self, work: Work) -> Graph:
        """Run `work`, so that nothing is left to compile or load, then capture it."""
        ...


class CudaRecorder:
    """Captures on `stream`, which must not be the default one. All graphs share one memory pool: they are replayed one
    after another, and none keeps a result in it.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> Graph:
        """See `Recorder`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            work()
            self._stream.synchronize()
            # `torch.cuda.graph` would empty the allocator's cache before every capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph


class DecodeGraphs:
    """The captured steps of a lane."""

    def __init__(self, ladder: Ladder, recorder: Recorder) -> None:
        self.ladder = ladder
        self.replayed = 0
        """Steps that a graph computed."""
        self.eager = 0
        """Steps in a bucket that had no graph and were launched kernel by kernel."""
        self._recorder = recorder
        self._graphs: dict[GraphKey, Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def captured(self) -> list[GraphKey]:
        """What was captured, in that order."""
        return list(self._graphs)

    def capture(self, key: GraphKey, work: Work) -> None:
        """Capture `work` for the steps of `key`. Raises `GraphError`."""
        try:
            self._graphs[key] = self._recorder.record(work)
        except RuntimeError as error:
            raise GraphError(
                f"capturing the decode step of {key.bucket} rows as a CUDA graph failed: "
                f"{str(error).partition(chr(10))[0]}; cuda_graphs: off runs without graphs"
            ) from error

    def run(self, key: GraphKey, work: Work) -> None:
        """Replay the graph of `key`, or do the same `work` without one."""
        graph = self._graphs.get(key)
        if graph is None:
            self.eager += 1
            work()
        else:
            self.replayed += 1
            graph.replay()
