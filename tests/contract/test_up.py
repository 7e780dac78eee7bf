"""`pagelane up` as a user runs it: what it prints, what the printed command gets, and that it leaves nothing behind."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.contract.conftest import tiny_flags
from worker.local import PORTS, free_port

PAGELANE = Path(sys.executable).parent / "pagelane"


@contextmanager
def pagelane_up(tiny: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The launcher with a tiny model, and its port. Its temporary files are made beside the model."""
    port = free_port(PORTS)
    command = [str(PAGELANE), "up", *tiny_flags(tiny), "--port", str(port), *flags]
    variables = os.environ | {"TMPDIR": str(tiny.parent)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    ) as process:
        try:
            yield process, port
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if word in line:
            return lines
    raise AssertionError("\n".join(["ended without " + word, *lines]))


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []


def test_up_serves_the_command_it_prints_and_ctrl_c_ends_all(tiny: Path) -> None:
    with pagelane_up(tiny, "--workers", "2") as (process, port):
        lines = read_until(process, "try: ")
        children = descendants(process)
        assert len(children) == 5, "a frontend, two workers and their two engine cores"
        assert [line for line in lines if line.startswith("worker 1") and "KV cache" in line], lines
        assert any(f"http://127.0.0.1:{port}/v1" in line for line in lines)
        answer = subprocess.run(
            shlex.split(lines[-1].partition("try: ")[2]), capture_output=True, text=True, timeout=60, check=True
        )
        assert not [line for line in lines if "ERROR" in line or "WARN" in line], lines
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=30)[0]
        assert process.returncode == 0, rest
        assert not list(tiny.parent.glob("pagelane-*")), "temporary files are left"
        assert "Traceback" not in rest
        assert_gone(children)


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]], ids=["once", "twice"])
def test_a_signal_while_the_workers_load_ends_all(tiny: Path, signals: list[signal.Signals]) -> None:
    with pagelane_up(tiny) as (process, _):
        read_until(process, "worker 0")
        children = descendants(process)
        assert children
        for number in signals:
            process.send_signal(number)
            time.sleep(0.05)
        rest = process.communicate(timeout=30)[0]
        assert process.returncode == 0, rest
        assert "Traceback" not in rest
        assert_gone(children)


def test_a_killed_launcher_takes_everything_with_it(tiny: Path) -> None:
    with pagelane_up(tiny) as (process, _):
        read_until(process, "try: ")
        children = descendants(process)
        process.kill()
        process.wait()
        assert_gone(children)


def test_the_last_workers_end_is_reported_and_ends_all(tiny: Path) -> None:
    with pagelane_up(tiny) as (process, _):
        read_until(process, "try: ")
        children = descendants(process)
        (worker,) = [child for child in children if child.cmdline()[1:3] == ["-m", "worker"]]
        worker.send_signal(signal.SIGKILL)
        rest = process.communicate(timeout=30)[0]
        assert process.returncode == 1
        assert "worker 0 was killed by SIGKILL" in rest
        assert_gone(children)


def test_a_worker_that_cannot_start_ends_all_with_its_reason(tiny: Path) -> None:
    with pagelane_up(tiny, "--kv-cache-memory", "4KiB") as (process, _):
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 1
        assert "worker 0 ended with exit code" in output
        assert "Traceback" not in output


def test_a_signal_while_the_model_is_imported_ends_all(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "endless.gguf"
    os.mkfifo(model)  # reading it waits for ever
    with pagelane_up(tiny, "--model", str(model)) as (process, _):
        read_until(process, "starting")
        deadline = time.monotonic() + 20
        while not (children := descendants(process)):
            assert time.monotonic() < deadline, "no import began"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=10)[0]
        assert process.returncode == 0, rest
        assert "Traceback" not in rest
        assert_gone(children)


def test_a_missing_model_is_named_and_starts_nothing(tiny: Path) -> None:
    with pagelane_up(tiny, "--model", "/nonexistent") as (process, _):
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 1
        assert "/nonexistent: no such model" in output
        assert "worker 0" not in output


def test_a_taken_port_is_one_line_and_starts_nothing(tiny: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        began = time.monotonic()
        command = [str(PAGELANE), "up", *tiny_flags(tiny), "--port", port]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    (line,) = (result.stdout + result.stderr).splitlines()
    assert port in line
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-page-size", "32"], ["32", "16", "64"]),
        (["--worker", "2"], ["--worker"]),
        (["--workers", "0"], ["--workers", "1"]),
        (["--config", "/nonexistent.yaml"], ["/nonexistent.yaml"]),
    ],
)
def test_a_bad_command_line_is_one_line(tiny: Path, flags: list[str], words: list[str]) -> None:
    command = [str(PAGELANE), "up", *tiny_flags(tiny), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    assert result.returncode == 2
    (line,) = (result.stdout + result.stderr).splitlines()
    assert all(word in line for word in words), line
