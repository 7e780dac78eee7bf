"""Speed of the CPU lane against `transformers.generate`: interleaved pairs in one process, medians, a JSON row a case.

    python -m tests.bench.cpu_speed MODEL_DIR [--pairs 5] [--threads 2] [--cases f32-1x64+64 ...]

Both sides get the same prompts, generate the same number of tokens greedily, and are timed from the prompt to the last
token. A row carries every pair's seconds, so that a noisy machine shows.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine.__main__ import wait_briefly

wait_briefly()  # for both sides, as in the engine core, and before torch is loaded

import numpy as np
import torch

from engine.config import CoreConfig
from engine.cpu.lane import CpuLane, create_cpu_lane
from tests.golden import Driver


class Case(NamedTuple):
    """`streams` requests of `prompt` tokens that generate `output` tokens each; `bar` is the least speed-up."""

    dtype: str
    streams: int
    prompt: int
    output: int
    bar: float

    @property
    def name(self) -> str:
        return f"{'f32' if self.dtype == 'float32' else 'bf16'}-{self.streams}x{self.prompt}+{self.output}"


CASES = (
    Case("float32", 1, 64, 64, 1.3),
    Case("float32", 8, 64, 64, 1.3),
    Case("float32", 1, 1024, 32, 1.1),
    Case("bfloat16", 1, 64, 64, 2.0),
    Case("bfloat16", 8, 64, 64, 1.25),
    Case("bfloat16", 1, 1024, 32, 1.1),
)


def has_bfloat16() -> bool:
    """True if the CPU multiplies bfloat16; without it the bfloat16 bars mean nothing."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "avx512_bf16" in cpuinfo.read_text()


def prompts_of(case: Case, vocab: int) -> list[list[int]]:
    random = np.random.default_rng(case.streams * 10_000 + case.prompt)
    return [random.integers(10, vocab, case.prompt).tolist() for _ in range(case.streams)]


def own_lane(directory: Path, dtype: str, threads: int) -> CpuLane:
    config = CoreConfig(
        model=str(directory),
        dtype=dtype,
        threads=threads,
        context_limit=2048,
        max_bucket=8,
        max_step_tokens=1024,
        kv_cache_memory="512MiB",
    )
    return create_cpu_lane(config, directory)


def own_run(lane: CpuLane, case: Case, prompts: list[list[int]]) -> float:
    """Seconds for `case` through the executor: prompts in chunks as a scheduler would, then decode steps."""
    driver = Driver(lane)
    lane.executor.tap = None
    began = time.perf_counter()
    rows = [driver.start(slot) for slot in range(case.streams)]
    driver.step(chunks=[(row, prompt, True) for row, prompt in zip(rows, prompts, strict=True)])
    for _ in range(case.output - 1):
        driver.step(rows)
    return time.perf_counter() - began


def reference_model(directory: Path, dtype: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def reference_run(model: Any, case: Case, prompts: list[list[int]]) -> float:
    """Seconds for `case` through `generate` with its default KV cache and attention."""
    ids = torch.tensor(prompts)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=case.output)
    seconds = time.perf_counter() - began
    if output.shape[1] != case.prompt + case.output:
        raise RuntimeError(f"generate gave {output.shape[1] - case.prompt} tokens instead of {case.output}")
    return seconds


def measure(case: Case, own: Callable[[], float], other: Callable[[], float], pairs: int) -> dict[str, Any]:
    """Interleave `pairs` runs of both after a warm-up run of each."""
    own()
    other()
    seconds = [(own(), other()) for _ in range(pairs)]
    ratio = statistics.median(theirs / ours for ours, theirs in seconds)
    tokens = case.streams * case.output
    return {
        "case": case.name,
        "speed_up": round(ratio, 3),
        "bar": case.bar,
        "own_tokens_per_s": round(tokens / statistics.median(ours for ours, _ in seconds), 1),
        "transformers_tokens_per_s": round(tokens / statistics.median(theirs for _, theirs in seconds), 1),
        "pairs_s": [(round(ours, 4), round(theirs, 4)) for ours, theirs in seconds],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    options = parser.parse_args(arguments)
    failed = 0
    for dtype in ("float32", "bfloat16"):
        cases = [case for case in CASES if case.dtype == dtype and case.name in options.cases]
        if not cases or (dtype == "bfloat16" and not has_bfloat16()):
            continue
        lane = own_lane(options.model, dtype, options.threads)
        model = reference_model(options.model, dtype)
        for case in cases:
            prompts = prompts_of(case, lane.model_config.vocab_size)
            row = measure(
                case, partial(own_run, lane, case, prompts), partial(reference_run, model, case, prompts), options.pairs
            )
            failed += row["speed_up"] < case.bar
            print(json.dumps(row), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
