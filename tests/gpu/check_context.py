"""What a CUDA process takes of a card before it has allocated anything, and what makes that smaller.

python -m tests.gpu.check_context

Every variant is a process of its own. MiB in use after each stage, others' included: the bare context, torch's first
tensor, its first stream (it makes a pool of them), a matrix product, and a kernel with local memory.
"""

import ctypes
import json
import os
import subprocess
import sys

from tests.gpu.harness import Results

MIB = 1 << 20
_STACK = 0
"""`CU_LIMIT_STACK_SIZE`."""
VARIANTS: dict[str, tuple[dict[str, str], int | None]] = {
    "as it is": ({}, None),
    "stack 512": ({}, 512),
    "stack 256": ({}, 256),
    "stack 16": ({}, 16),
    "one connection": ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, None),
    "short launch queues": ({"CUDA_SCALE_LAUNCH_QUEUES": "0.25x"}, None),
    "modules loaded at once": ({"CUDA_MODULE_LOADING": "EAGER"}, None),
}
"""By name: environment, and the limit of a thread's stack in bytes."""


def child(stack: int | None) -> None:
    """Go through the stages of one variant and print what is in use after each."""
    driver = ctypes.CDLL("libcuda.so.1")
    seen: dict[str, float] = {}

    def note(stage: str) -> None:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        code = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        seen[stage] = (total.value - free.value) / MIB if not code else -1.0

    device, context = ctypes.c_int(), ctypes.c_void_p()
    for code in (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        driver.cuCtxSetCurrent(context),
    ):
        if code:
            raise SystemExit(f"the driver failed with {code}")
    note("context")
    if stack is not None:
        code = driver.cuCtxSetLimit(_STACK, ctypes.c_size_t(stack))
        limit = ctypes.c_size_t()
        driver.cuCtxGetLimit(ctypes.byref(limit), _STACK)
        seen["stack limit, bytes"] = float(limit.value) if not code else -1.0
        note("stack limited")
    import torch

    kept = [torch.zeros(1, device="cuda")]
    torch.cuda.synchronize()
    note("first tensor")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    note("first stream")
    with torch.cuda.stream(stream):
        matrix = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
        kept += [matrix, matrix @ matrix]
    torch.cuda.synchronize()
    note("matrix product")
    kept.append(torch.sort(torch.rand(1 << 16, device="cuda")).values)
    torch.cuda.synchronize()
    note("sort")
    seen["held by torch"] = torch.cuda.memory_reserved() / MIB
    limit = ctypes.c_size_t()
    driver.cuCtxGetLimit(ctypes.byref(limit), _STACK)
    seen["stack limit at the end, bytes"] = float(limit.value)
    print(json.dumps(seen))


def main() -> None:
    """Run every variant."""
    results = Results("context")
    for name, (environment, stack) in VARIANTS.items():
        command = [sys.executable, "-m", "tests.gpu.check_context", "--child", "" if stack is None else str(stack)]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
        )
        lines = done.stdout.strip().splitlines()
        stages = json.loads(lines[-1]) if not done.returncode and lines else {}
        results.emit(name, ok=bool(stages), stages=stages, error=done.stderr[-300:] if not stages else "")
    results.emit("summary", failed=results.failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]) if sys.argv[2] else None)
    else:
        main()
