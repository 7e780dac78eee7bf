"""How a worker process starts or refuses to: one line, an exit code, nothing left behind."""

import json
import socket

import pytest

from engine.messages import Sampling
from worker import cli, serve
from worker.config import ConfigError
from worker.local import PORTS, free_port
from worker.model import PARSERS, generation_defaults, parsers


@pytest.fixture(autouse=True)
def no_discovery(monkeypatch):
    """If a start goes further than a test expects, it must not wait for etcd."""
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "mem")


def run(capsys, argv: list[str]) -> tuple[int, str]:
    code = cli.main(["worker", *argv])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


@pytest.mark.parametrize(
    ("argv", "code", "named"),
    [
        (["--model", "m", "--kv-page-size", "32"], 2, "16 or 64"),
        (["--modle", "m"], 2, "--model"),
        ([], 2, "model is not set"),
        (["--model", "/no/such/model"], 1, "/no/such/model"),
    ],
)
def test_a_bad_start_is_one_line_and_an_exit_code(capsys, argv, code, named):
    got, text = run(capsys, argv)
    assert got == code
    assert named in text
    assert text.startswith("pagelane: error: ")
    assert text.count("\n") == 1


def test_a_taken_system_port_is_refused(capsys, monkeypatch, tmp_path):
    with socket.socket() as taken:
        taken.bind(
            ("127.0.0.1", free_port(PORTS))
        )  # Dynamo takes none above 32767, where the kernel's own choice may lie
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("DYN_SYSTEM_HOST", "127.0.0.1")
        monkeypatch.setenv("DYN_SYSTEM_PORT", str(port))
        code, text = run(capsys, ["--model", str(tmp_path)])
    assert code == 1
    assert f"DYN_SYSTEM_PORT {port}" in text
    assert text.count("\n") == 1
    serve.check_system_port({"DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SYSTEM_PORT": str(port)})


@pytest.mark.parametrize("port", ["", "0", "-1"])
def test_no_system_port_is_no_error(port):
    serve.check_system_port({"DYN_SYSTEM_PORT": port})


def test_health_tells_of_the_endpoint_that_serves_unless_it_is_set_otherwise():
    environ: dict[str, str] = {}
    serve.make_health_tell_of("generate", environ)
    assert environ == {"DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]'}
    environ = {"DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": "[]"}
    serve.make_health_tell_of("generate", environ)
    assert environ == {"DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": "[]"}


def test_help_is_no_error(capsys):
    assert cli.main(["worker", "--help"]) == 0
    assert "--kv-page-size" in capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert "pagelane up" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["serve"], ["import"], ["import", "a.gguf"]])
def test_an_unknown_command_prints_the_usage(capsys, argv):
    assert cli.main(argv) == 2
    assert "usage: pagelane" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (None, (1.0, 0, 1.0, 0.0)),
        ({}, (1.0, 0, 1.0, 0.0)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, (0.6, 20, 0.95, 0.0)),
        ({"temperature": 0.7, "min_p": 0.05}, (0.7, 0, 1.0, 0.05)),
        ({"do_sample": False, "temperature": 0.7, "eos_token_id": [1, 2]}, (0.0, 0, 1.0, 0.0)),
        ({"top_k": -1}, (1.0, 0, 1.0, 0.0)),
        ({"top_k": 3_000_000_000}, (1.0, 2**31 - 1, 1.0, 0.0)),
    ],
)
def test_sampling_defaults_come_from_the_models_file(tmp_path, file, expected):
    if file is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
    sampling = generation_defaults(tmp_path)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == expected


def test_the_repetition_penalty_comes_from_the_models_file(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.1, "do_sample": False}))
    assert generation_defaults(tmp_path) == Sampling(repetition_penalty=1.1)


@pytest.mark.parametrize("text", ["{", '{"temperature": "hot"}', "[]"])
def test_a_broken_file_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        generation_defaults(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1), ("top_p", -3), ("top_p", 0), ("top_p", 1.5), ("min_p", 7), ("min_p", -0.1), ("top_k", -2)],
)
@pytest.mark.parametrize("do_sample", [True, False])
def test_a_default_that_no_client_may_ask_for_is_refused(tmp_path, key, value, do_sample):
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": do_sample, key: value}))
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {key} is {value}") as refusal:
        generation_defaults(tmp_path)
    assert "\n" not in str(refusal.value)


def test_parsers_exist_in_dynamo_and_follow_the_family(tmp_path):
    from dynamo._core import get_reasoning_parser_names, get_tool_parser_names

    for family, names in PARSERS.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        assert parsers(tmp_path) == names
        assert {names[0]} <= {None, *get_tool_parser_names()}
        assert {names[1]} <= {None, *get_reasoning_parser_names()}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert parsers(tmp_path) == (None, None)
