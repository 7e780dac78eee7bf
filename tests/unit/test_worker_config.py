"""Where settings come from, who wins, and what is said when one cannot be used."""

from pathlib import Path

import pytest

from engine.config import CoreConfig
from worker.config import ConfigError, WorkerConfig
from worker.flags import FIELDS, HelpRequested, description, help_text, load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def load(*argv: str, environ: dict[str, str] | None = None) -> WorkerConfig:
    return load_config(argv, environ or {})


def refusal(*argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv, environ=environ)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def yaml(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "worker.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_flags_win_over_the_file_and_the_file_over_the_environment(yaml):
    path = yaml("model: m\nnamespace: from-file\ncomponent: from-file\n")
    environ = {"DYN_NAMESPACE": "from-env", "DYN_COMPONENT": "from-env", "DYN_DISCOVERY_BACKEND": "file"}
    config = load("--config", path, "--component", "from-flag", environ=environ)
    assert (config.discovery_backend, config.namespace, config.component) == ("file", "from-file", "from-flag")


def test_the_operators_suffix_is_appended_to_the_namespace():
    assert load("--model", "m", environ={"DYN_NAMESPACE_WORKER_SUFFIX": "a1"}).namespace == "dynamo-a1"


def test_an_empty_variable_is_no_setting():
    assert load("--model", "m", environ={"DYN_NAMESPACE": ""}).namespace == "dynamo"


def test_values_are_converted():
    config = load("--model=m", "--context-limit", "null", "--max-queue-s=2.5", "--enable-kv-events", "false")
    assert (config.context_limit, config.max_queue_s, config.enable_kv_events) == (None, 2.5, False)


def test_the_core_gets_its_part_unchanged():
    core = load("--model", "m", "--kv-page-size", "64", "--namespace", "n").core()
    assert type(core) is CoreConfig
    assert (core.model, core.kv_page_size) == ("m", 64)


@pytest.mark.parametrize("value", ["32", "0", "-16", "128", "sixteen"])
def test_another_page_size_is_refused_and_both_are_named(value):
    text = refusal("--model", "m", "--kv-page-size", value)
    assert value in text
    assert "16 or 64" in text


def test_an_unknown_flag_names_the_nearest():
    assert "--kv-page-size" in refusal("--kv-pagesize", "16")


def test_an_unknown_key_of_the_file_names_the_nearest(yaml):
    text = refusal("--config", yaml("model: m\nmax_buckets: 4\n"))
    assert "'max_buckets'" in text
    assert text.endswith("max_bucket")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("max_bucket", "many", "a whole number of at least 1"),
        ("max_bucket", "0", "a whole number of at least 1"),
        ("context_limit", "-5", "a whole number of at least 2 and at most 2147483647 or null"),
        ("device", "tpu", "cpu"),
        ("pipeline_depth", "3", "at most 2"),
        ("step_timeout_s", "0", "a number of at least 1"),
        ("enable_kv_events", "sometimes", "true or false"),
        ("discovery_backend", "consul", "kubernetes"),
        ("namespace", "", "letters, digits, _ and -"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(yaml, key, value, allowed):
    for text in (
        refusal("--model", "m", f"--{key.replace('_', '-')}", value),
        refusal("--config", yaml(f"model: m\n{key}: {value or repr('')}\n")),
    ):
        assert key.replace("_", "-") in text.replace("_", "-")
        assert repr(value)[1:-1] in text
        assert allowed in text


def test_the_file_is_typed_strictly(yaml):
    assert "max_bucket is '16'" in refusal("--config", yaml("model: m\nmax_bucket: '16'\n"))


def test_a_key_that_stands_twice_is_refused(yaml):
    assert "'max_bucket' stands twice" in refusal("--config", yaml("model: m\nmax_bucket: 4\nmax_bucket: 8\n"))


@pytest.mark.parametrize("text", ["- model\n", "model: [\n", "model: !!python/object/apply:os.getcwd []\n", "\x00"])
def test_a_file_that_is_no_plain_mapping_is_refused(yaml, text):
    refusal("--config", yaml(text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    assert "none.yaml" in refusal("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    "argv", [["--model"], ["serve"], ["-m", "x"], [], ["--model", "m", "--endpoint-types", "images"]]
)
def test_a_command_line_that_makes_no_sense_is_refused(argv):
    refusal(*argv)


@pytest.mark.parametrize("path", ["none.jinja", "x" * 5000, "a\0b"])
def test_a_chat_template_that_is_no_file_is_refused(path):
    assert "custom_jinja_template" in refusal("--model", "m", "--custom-jinja-template", path)


def test_a_step_must_hold_every_active_request():
    text = refusal("--model", "m", "--max-bucket", "64", "--max-step-tokens", "32")
    assert "64" in text
    assert "32" in text


def test_a_chunk_must_fit_in_a_step():
    assert "513" in refusal("--model", "m", "--max-chunk-tokens", "513")


def test_buckets_are_numbers_within_max_bucket():
    text = refusal("--model", "m", "--max-bucket", "64", "--max-step-tokens", "64", "--graph-buckets", "1,65")
    assert "65" in text
    assert "max_bucket, 64" in text
    assert "1,2,4,8" in refusal("--model", "m", "--graph-buckets", "all")
    assert load("--model", "m", "--graph-buckets", "1,2").graph_buckets == "1,2"
    assert "auto or off" in refusal("--model", "m", "--cuda-graphs", "on")


@pytest.mark.parametrize(
    ("drain", "environ", "ok"),
    [
        ("20.9", {}, True),
        ("21", {}, False),  # with 5 s of grace and 4 s to end the core
        ("25.9", {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"}, True),
        ("1", {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "nan"}, False),
        ("60", {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "90"}, True),
        ("60", {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "60"}, False),
        ("60", {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "soon"}, False),
        ("nan", {}, False),
    ],
)
def test_the_drain_must_end_before_dynamos_deadline(drain, environ, ok):
    argv = ("--model", "m", "--drain-timeout-s", drain)
    if ok:
        assert load(*argv, environ=environ).drain_timeout_s == float(drain)
    else:
        refusal(*argv, environ=environ)


def test_help_prints_every_key_with_meaning_and_default():
    with pytest.raises(HelpRequested) as caught:
        load("--help")
    text = str(caught.value)
    assert text == help_text()
    for key in FIELDS:
        assert f"--{key.replace('_', '-')} (" in text
        assert len(description(key)) > 10
    assert "default 512" in text


def test_there_are_configs():
    assert {path.stem for path in CONFIGS} >= {"smollm2-cpu", "qwen3-4b", "qwen3-8b", "qwen3-14b"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_loads_and_names_every_key_with_a_comment(path):
    load("--config", str(path))
    lines = path.read_text().splitlines()
    for key in FIELDS:
        index = next((i for i, line in enumerate(lines) if line.removeprefix("# ").startswith(f"{key}:")), None)
        assert index is not None, f"{path.name} does not name {key}"
        assert lines[index - 1].startswith("#"), f"{path.name}: {key} has no comment above it"


def test_the_gpu_memory_limit_is_a_size_or_null() -> None:
    assert load("--model", "m").gpu_memory_limit is None
    assert load("--model", "m", "--gpu-memory-limit", "24GiB").core().gpu_memory_limit == "24GiB"
    with pytest.raises(ConfigError, match=r"gpu_memory_limit: 'much' is no size: write a number and KiB"):
        load("--model", "m", "--gpu-memory-limit", "much")
