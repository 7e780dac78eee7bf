"""What an operator gets wrong is refused before anything is loaded, in one line with the key and what is allowed."""

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engine.models.chat_template import has_chat_template
from engine.models.files import ModelError
from engine.models.resolve import resolve_model
from tests.models import tiny_model
from worker.config import ConfigError
from worker.flags import load_config
from worker.serve import check_system_port, check_texts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


@pytest.mark.parametrize("port", ["99999", "32768", "abc", "-5", "１２"])
def test_a_system_port_that_is_none_is_refused_with_the_range(port):
    with pytest.raises(ConfigError, match="from 1 to 32767"):
        check_system_port({"DYN_SYSTEM_PORT": port})


@pytest.mark.parametrize("port", ["", "0", "-1"])
def test_no_system_port_is_fine(port):
    check_system_port({"DYN_SYSTEM_PORT": port})


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"\0\xffgarbage", b"[]", b"", b'{"a":', b"[" * 100_000])
def test_text_files_that_are_no_json_object_are_refused_by_name(model, name, content):
    (model / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name}: is not a JSON object"):
        resolve_model(str(model))


def test_a_model_without_a_chat_template_is_refused_for_chat_only(model):
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))
    assert not has_chat_template(model)
    dynamo = SimpleNamespace(model_name=str(model), tool_call_parser=None, reasoning_parser=None)
    with pytest.raises(ConfigError, match="has no chat template"):
        check_texts(load_config(["--model", str(model)], {}), dynamo)
    check_texts(load_config(["--model", str(model), "--endpoint-types", "completions"], {}), dynamo)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    check_texts(load_config(["--model", str(model)], {}), dynamo)


def test_a_template_of_ones_own_is_looked_at_too(model, tmp_path):
    template = tmp_path / "own.jinja"
    config = load_config(["--model", str(model), "--custom-jinja-template", __file__], {})
    dynamo = SimpleNamespace(model_name=str(model), tool_call_parser=None, reasoning_parser=None)
    config = msgspec.structs.replace(config, custom_jinja_template=str(template))
    template.write_text("{% for m in messages %}{{ m.content }}")
    with pytest.raises(ModelError, match=r"own.jinja: line 1: .*endfor"):
        check_texts(config, dynamo)
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    check_texts(config, dynamo)
    # It stands in for one of the model's that the frontend could not use.
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{% for m in messages %}"}))
    check_texts(config, dynamo)
    with pytest.raises(ModelError, match="set custom_jinja_template"):
        check_texts(msgspec.structs.replace(config, custom_jinja_template=None), dynamo)
    (tmp_path / "link.jinja").symlink_to(template)
    check_texts(msgspec.structs.replace(config, custom_jinja_template=str(tmp_path / "link.jinja")), dynamo)


@pytest.mark.parametrize("key", ["tool_call_parser", "reasoning_parser"])
def test_a_parser_that_dynamo_does_not_know_is_refused_with_those_it_knows(model, key):
    names = {"tool_call_parser": None, "reasoning_parser": None} | {key: "nonsense"}
    with pytest.raises(ConfigError, match=rf"{key} is 'nonsense', but Dynamo knows .*qwen3"):
        check_texts(load_config(["--model", str(model)], {}), SimpleNamespace(model_name=str(model), **names))


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-queue", "9" * 23],
        ["--max-bypass", str(2**31)],
        ["--threads", "100000"],
        ["--context-limit", "1"],
        ["--step-timeout-s", "1e-9"],
        ["--itl-target-ms", "inf"],
        ["--priority-aging-s", "1e-320"],
        ["--namespace", "a/b c.d"],
        ["--custom-jinja-template", "/nonexistent"],
    ],
    ids=lambda flags: flags[0],
)
def test_values_out_of_bounds_are_refused_by_key(flags):
    with pytest.raises(ConfigError, match=flags[0].strip("-").replace("-", "[-_]")):
        load_config(["--model", "x", *flags], {})
