"""The launcher's pure parts: log lines, command line, versions, ports; and children that never outlive it."""

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from worker.config import ConfigError
from worker.launch import curl_line, parse, share_cards, share_cores, usage, visible_cards
from worker.local import PORTS, LocalConfig, LocalError, LocalStack, PortTaken, check_port, free_port
from worker.local import response_stream_host as stream_host
from worker.process import ChildConfig, readable, start_child


def record(level: str, target: str, message: str, **fields: str) -> str:
    return json.dumps({"time": "2026-01-01T00:00:00Z", "level": level, "target": target, "message": message, **fields})


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("KV cache: 12 pages\n", "KV cache: 12 pages"),
        ("\x1b[2mfaint\x1b[0m and \x1b[32mgreen\x1b[0m", "faint and green"),
        ("{not json", "{not json"),
        ("2026-12-01 01:20:26,953 INFO    engine.build: weights: 5 of 5 MiB", "weights: 5 of 5 MiB"),
        ("2026-12-01 01:20:26,953 WARNING engine.core: slow", "WARNING: slow"),
        (record("INFO", "log", "worker 1: loaded", **{"log.target": "backend.start"}), "worker 1: loaded"),
        (record("WARN", "log", "slow"), "WARN: slow"),
        (record("ERROR", "dynamo_llm::http", "lost", error="gone"), "ERROR: lost (gone)"),
        (record("INFO", "dynamo_backend_common::worker", "Serving m"), "Serving m"),
        (record("WARN", "dynamo_kv_router::sequences", "Adding worker"), None),
        (record("INFO", "dynamo_llm::preprocessor", "Selected"), None),
        (record("INFO", "log", "Request migration", **{"log.target": "main.async_main"}), None),
        (record("ERROR", "dynamo_runtime::component", "monitor_instance_source: The Sender is dropped: x"), None),
    ],
)
def test_a_log_line_is_made_readable_or_left_out(line: str, shown: str | None) -> None:
    assert readable(line) == shown


@pytest.mark.parametrize(("version", "host"), [("1.4.2", "lo"), ("1.6.1", "127.0.0.1"), ("2.0.0", "127.0.0.1")])
def test_the_response_stream_host_is_an_interface_in_old_versions(version: str, host: str) -> None:
    assert stream_host(version) == host


def test_worker_flags_pass_through_and_the_launchers_do_not() -> None:
    config = parse(["--model", "m", "--workers", "3", "--kv-page-size=64", "--port", "1234"], {})
    assert (config.workers, config.port, config.host, config.router_mode) == (3, 1234, "127.0.0.1", "kv")
    assert config.worker_flags == ["--model", "m", "--kv-page-size=64"]
    assert config.worker.kv_page_size == 64


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "0"], ["--workers is 0", "1"]),
        (["--port", "70000"], ["70000", "65535"]),
        (["--router-mode", "magic"], ["magic", "kv"]),
        (["--kv-page-size", "32"], ["32", "16", "64"]),
        (["--thread", "1"], ["--thread", "--threads"]),
    ],
)
def test_a_bad_flag_is_refused_with_what_is_allowed(flags: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(["--model", "m", *flags], {})
    assert all(word in str(refusal.value) for word in words)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "cores", "added"),
    [
        ([], 8, []),
        (["--workers", "2"], 8, ["--threads", "4"]),
        (["--workers", "3"], 2, ["--threads", "1"]),
        (["--workers", "2", "--threads", "7"], 8, []),
    ],
)
def test_workers_share_the_cores_unless_told(flags: list[str], cores: int, added: list[str]) -> None:
    config = parse(["--model", "m", *flags], {})
    assert share_cores(config, cores) == [*config.worker_flags, *added]


def test_visible_cards_are_those_of_the_variable_or_of_the_driver(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert visible_cards({}, tmp_path) == ["0", "1"]
    assert visible_cards({}, tmp_path / "no driver") == []
    assert visible_cards({"CUDA_VISIBLE_DEVICES": "3, GPU-5a"}, tmp_path) == ["3", "GPU-5a"]
    assert visible_cards({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


@pytest.mark.parametrize(
    ("flags", "cards", "shared"),
    [
        (["--workers", "2"], ["0", "1", "2"], ["0", "1", "2"]),
        (["--workers", "2", "--device", "cuda"], ["4", "5"], ["4", "5"]),
        (["--workers", "2", "--device", "cpu"], ["0", "1"], []),
        (["--workers", "1"], ["0", "1"], []),
        (["--workers", "2", "--device", "cuda"], [], []),
    ],
)
def test_workers_take_turns_at_the_cards(flags: list[str], cards: list[str], shared: list[str]) -> None:
    assert list(share_cards(parse(["--model", "m", *flags], {}), cards)) == shared


def test_more_workers_than_cards_are_refused_with_both_numbers() -> None:
    config = parse(["--model", "m", "--workers", "3", "--device", "cuda"], {})
    with pytest.raises(ConfigError, match=r"--workers is 3, but this machine offers 2 GPUs .* lower --workers to 2"):
        share_cards(config, ["0", "1"])


async def test_each_worker_sees_its_own_card(tmp_path: Path) -> None:
    lines: list[str] = []
    show = (sys.executable, "-c", "import os; print('card', os.environ['CUDA_VISIBLE_DEVICES'])")
    stack = LocalStack(LocalConfig(worker_command=show, cards=("4", "5"), on_line=lambda _, line: lines.append(line)))
    stack._directory = tmp_path
    for _ in range(3):
        worker = await stack.add_worker(wait=False)
        await worker.child.wait()
    assert lines == ["card 4", "card 5", "card 4"]


def test_the_help_shows_the_launchers_flags_and_the_workers() -> None:
    text = usage()
    assert all(f"  --{flag} " in text for flag in ("workers", "port", "router-mode", "config", "kv-page-size"))


def test_the_curl_line_is_a_request_for_the_served_model() -> None:
    line = curl_line("http://127.0.0.1:8000", "SmolLM2")
    assert json.loads(line[line.index("'{") + 1 : -1])["model"] == "SmolLM2"


def test_a_free_port_fits_what_dynamo_reads_and_a_taken_one_is_named() -> None:
    port = free_port(PORTS)
    assert port < 32768
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        with pytest.raises(PortTaken, match=str(port)):
            check_port("127.0.0.1", port)


async def test_a_child_that_ends_is_quoted() -> None:
    lines: list[tuple[str, str]] = []
    code = "import sys; print('one'); print('the reason', file=sys.stderr); sys.exit(3)"
    child = await start_child(
        ChildConfig("worker 0", [sys.executable, "-c", code], os.environ, lambda *a: lines.append(a))
    )
    assert await child.wait() == 3
    assert sorted(lines) == [("worker 0", "one"), ("worker 0", "the reason")]
    assert child.last_words.startswith("worker 0 ended with exit code 3: ")


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    heard = asyncio.Event()
    child = await start_child(ChildConfig("deaf", [sys.executable, "-c", code], os.environ, lambda *_: heard.set()))
    await heard.wait()
    assert await child.stop(0.2) == -signal.SIGKILL
    assert "was killed by SIGKILL" in child.last_words


async def test_a_line_longer_than_the_limit_does_not_end_the_reading() -> None:
    lines: list[str] = []
    code = "print('x' * 3_000_000); print('after')"
    child = await start_child(
        ChildConfig("long", [sys.executable, "-c", code], os.environ, lambda _, line: lines.append(line))
    )
    assert await child.wait() == 0
    assert lines[-1] == "after"


async def test_a_stack_whose_worker_dies_gives_its_reason_and_leaves_nothing() -> None:
    code = "import sys; print('no such model'); sys.exit(5)"
    stack = LocalStack(LocalConfig(worker_command=(sys.executable, "-c", code), start_timeout_s=30))
    with pytest.raises(LocalError, match="worker 0 ended with exit code 5: no such model"):
        await stack.start()
    directory = stack.directory
    assert await stack.stop() == []
    assert not directory.exists()
    assert stack.processes() == []


async def test_orphans_of_a_stack_are_found_by_their_environment_and_killed(tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    code = (
        "import subprocess, sys, pathlib; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
        f"start_new_session=True); pathlib.Path({str(pidfile)!r}).write_text(str(p.pid)); sys.exit(1)"
    )
    stack = LocalStack(LocalConfig(worker_command=(sys.executable, "-c", code), start_timeout_s=30))
    with pytest.raises(LocalError):
        await stack.start()
    assert await stack.stop() == [int(pidfile.read_text())]
