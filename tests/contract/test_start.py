"""A worker that cannot start: one line with the reason, no traceback, an exit code, nothing left in discovery."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.conftest import tiny_flags
from tests.models import tiny_model
from tests.stack import Stack
from worker.local import PORTS, free_port


def run_worker(tmp_path: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a worker that is expected to end by itself, with a discovery directory of its own."""
    discovery = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(tmp_path / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
    }
    return subprocess.run(
        [sys.executable, "-m", "worker", *flags],
        env=os.environ | discovery | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_refused(tmp_path: Path, result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    output = result.stdout + result.stderr
    assert result.returncode == code, output
    assert "Traceback" not in output
    reasons = [line for line in output.splitlines() if all(word in line for word in words)]
    assert reasons, output
    # An event channel may stay until its lease ends, some 10 s later: nobody is sent there.
    left = [path for kind in ("instances", "mdc") for path in (tmp_path / "discovery/v1" / kind).rglob("*")]
    assert not [path for path in left if path.is_file()]


@pytest.mark.parametrize("value", ["32", "0", "sixteen"])
def test_another_page_size_is_refused_with_the_allowed_ones(tmp_path: Path, tiny: Path, value: str) -> None:
    result = run_worker(tmp_path, "--model", str(tiny), "--kv-page-size", value)
    assert_refused(tmp_path, result, 2, value, "16", "64")
    assert len((result.stdout + result.stderr).splitlines()) == 1


def test_a_missing_model_path_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model"
    result = run_worker(tmp_path, "--model", str(missing))
    assert result.returncode in (1, 2)
    assert_refused(tmp_path, result, result.returncode, str(missing))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (model / "config.json").write_text(json.dumps(config))
    result = run_worker(tmp_path, "--model", str(model))
    assert result.returncode in (1, 2)
    assert_refused(tmp_path, result, result.returncode, "MambaForCausalLM")


def test_a_taken_system_port_is_refused(tmp_path: Path, tiny: Path) -> None:
    with socket.socket() as holder:
        port = str(free_port(PORTS))
        holder.bind(("127.0.0.1", int(port)))
        holder.listen()
        result = run_worker(tmp_path, "--model", str(tiny), DYN_SYSTEM_HOST="127.0.0.1", DYN_SYSTEM_PORT=port)
    assert_refused(tmp_path, result, 1, "DYN_SYSTEM_PORT", port)


def test_a_pool_too_small_for_one_page_is_refused(tmp_path: Path, tiny: Path) -> None:
    result = run_worker(tmp_path, *tiny_flags(tiny, kv_cache_memory="4KiB"))
    assert result.returncode in (1, 2)
    assert_refused(tmp_path, result, result.returncode, "page")


def test_a_second_worker_with_another_page_size_does_not_join(tiny: Path) -> None:
    with Stack(*tiny_flags(tiny)) as stack:
        before = stack.discovered()
        second = stack.add_worker("--kv-page-size", "64", wait=False)
        assert stack.wait_exit(second) != 0
        stack.workers.remove(second)
        said = "\n".join(second.child.tail)
        assert "Traceback" not in said
        assert "16" in said
        assert "64" in said
        assert stack.discovered() == before
