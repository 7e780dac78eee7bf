"""Compiles the Triton kernels for cards that need not be here: `python -m tests.kernel_compiler`, not interpreted.

The interpreter takes what the compiler refuses, a name of another type in each branch for example. Each wrapper is
called as a lane calls it; its launches are compiled for each target in place of being run.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from engine.kernels.logprobs import LogprobColumns, LogprobOutputs, read_logprobs
from engine.kernels.penalize import PenaltyColumns, count, mark, penalize
from engine.kernels.rope_append import rope_append
from engine.kernels.sample import SampleColumns, sample
from engine.kernels.sample_space import SampleSpace, space_shapes
from engine.kernels.step_head import write_step

TARGETS = (80, 90)
VOCAB, ROWS, SLOTS = 151_936, 4, 5
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_launch(kernel: JITFunction, args: tuple[Any, ...], options: dict[str, Any], capability: int) -> None:
    """Compile `kernel` as a launch with these arguments would."""
    names = [parameter.name for parameter in kernel.params]
    given = dict(zip(names, args, strict=False)) | {name: options[name] for name in names if name in options}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[place,] = value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[parameter.name] = _TYPES[value.dtype] if is_tensor else "fp32" if isinstance(value, float) else "i32"
        if (value.data_ptr() if is_tensor else value if isinstance(value, int) else 1) % 16 == 0:
            attributes[place,] = [["tt.divisibility", 16]]
    triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": options.get("num_warps", 4)},
    )


def launches() -> list[Callable[[], None]]:
    """The wrappers, with arguments of a lane's shapes."""

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    logits, slots = torch.zeros(ROWS, VOCAB), ints(ROWS, dtype=torch.int64)
    space = SampleSpace(**{name: ints(*shape, dtype=getattr(torch, kind)) for name, (shape, kind) in shapes().items()})
    floats = torch.zeros(4, SLOTS)
    columns = SampleColumns(floats[0], ints(SLOTS), floats[1], floats[2], ints(SLOTS, dtype=torch.int64))
    penalties = PenaltyColumns(floats[0], floats[1], floats[2], ints(SLOTS))
    marks, tokens, results = ints(SLOTS, VOCAB, dtype=torch.int16), ints(ROWS), torch.zeros(ROWS, 41)
    outputs = LogprobOutputs(results[:, 0], results[:, 1:21].view(torch.int32), results[:, 21:])
    kv, weight = torch.zeros(4, 2, 2, 16, 2, 128, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16)
    append = {"cos_sin": torch.zeros(64, 128), "positions": tokens, "slots": slots, "eps": 1e-6}
    qkv, queries = kv.new_zeros(ROWS, 12 * 128), kv.new_zeros(ROWS, 8, 128)
    head = dict.fromkeys(("last_tokens", "row_slots", "lengths", "query_indptr", "chunk_tokens"), ints(64))
    head |= dict.fromkeys(("page_indptr", "page_indices", "last_page_len", "token_ids", "positions"), ints(64))
    head |= {"block_table": ints(SLOTS, 64), "slot_mapping": ints(64, dtype=torch.int64)}
    return [
        lambda: sample(logits, columns, slots, slots, tokens, space),
        lambda: read_logprobs(logits, LogprobColumns(columns, tokens), slots, tokens, outputs, space, tokens),
        lambda: penalize(logits, marks, penalties, slots, slots),
        lambda: count(marks, penalties, slots, tokens),
        lambda: mark(marks[1], tokens, tokens, ROWS),
        lambda: rope_append(qkv, queries, kv, 0, q_weight=weight, k_weight=weight, **append),
        lambda: write_step(**head, rows=ROWS, decode_rows=2, page_size=16),
    ]


def shapes() -> dict[str, tuple[tuple[int, ...], str]]:
    """Of the sampler's scratch."""
    return space_shapes(ROWS, VOCAB)


def main() -> None:
    compiled: set[str] = set()

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        for capability in () if kernel.fn.__name__ in compiled else TARGETS:
            compile_launch(kernel, args, options, capability)
        compiled.add(kernel.fn.__name__)

    JITFunction.run = run
    for launch in launches():
        launch()
    print(*sorted(compiled))


if __name__ == "__main__":
    main()
