"""Every Triton kernel compiles for the cards it is meant for; the interpreter takes more than the compiler does."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_kernel_compiles_for_sm80_and_sm90(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernel_compiler"],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    sources = "".join(path.read_text() for path in (ROOT / "engine/kernels").glob("*.py"))
    launched = re.findall(r"^ +(_\w+)\[(?:\(|grid\])", sources, re.MULTILINE)
    assert set(launched) == set(result.stdout.split())
    assert len(launched) > 8
