"""What the chart renders, read by those that it is for: the worker's configuration and the frontend's command line."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dynamo.frontend.main import parse_args

from engine.messages import Ready, Stats
from tests.helm.chart import (
    CHART,
    EXAMPLES,
    MORE_VALUES,
    Object,
    Render,
    cases,
    environment,
    find,
    main_container,
    pod,
    worker_yaml,
)
from worker.config import CORE_KILL_S, CORE_STOP_S, GRACE_PERIOD, SHUTDOWN_DEADLINE, WorkerConfig
from worker.flags import FIELDS, load_config
from worker.metrics import LaneCollector, Sources

pytestmark = pytest.mark.helm

CASES = {name: (path, mode) for name, path, mode in cases()}
REPOSITORY = CHART.parents[1]
OPERATOR = {
    "DYN_NAMESPACE": "prod-demo-pagelane",
    "DYN_NAMESPACE_WORKER_SUFFIX": "0a1b2c3d",
    "DYN_COMPONENT": "worker",
    "DYN_DISCOVERY_BACKEND": "kubernetes",
}
"""What the operator adds to a worker's variables."""


def load(objects: list[Object], folder: Path, mode: str) -> WorkerConfig:
    """The configuration as the rendered worker reads it: arguments, file and variables."""
    (folder / "worker.yaml").write_text(worker_yaml(objects))
    container = main_container(objects, "worker")
    arguments = [arg.replace("/etc/pagelane", str(folder)) for arg in container["args"]]
    return load_config(arguments, (OPERATOR if mode == "dynamo" else {}) | environment(container))


@pytest.mark.parametrize("name", CASES)
def test_the_worker_takes_its_configuration(name: str, tmp_path: Path) -> None:
    path, mode = CASES[name]
    values = yaml.safe_load((CHART / "values.yaml").read_text())["worker"]["config"]
    values |= yaml.safe_load(path.read_text())["worker"].get("config", {})
    config = load(Render(values=(path,), mode=mode).objects(), tmp_path, mode)
    for key, value in values.items():
        default = FIELDS[key].default if value is None else value
        assert getattr(config, key) == (None if default == "null" else default), key
    assert config.discovery_backend == "kubernetes"
    assert (config.request_plane, config.event_plane) == ("tcp", "zmq")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_agree_with_the_shipped_configs(path: Path) -> None:
    shipped = {"cpu-demo": "smollm2-cpu", "eight-gpus": "qwen3-14b", "kv-routing": "qwen3-8b", "single-gpu": "qwen3-4b"}
    config = yaml.safe_load((REPOSITORY / "configs" / f"{shipped[path.stem]}.yaml").read_text())
    rendered = yaml.safe_load(worker_yaml(Render(values=(path,)).objects()))
    own = {"model", "drain_timeout_s", "threads", "gpu_memory_utilization"}
    own |= {"kv_page_size", "itl_target_ms", "max_queue_s"} if path.stem == "kv-routing" else set()
    assert {k: v for k, v in rendered.items() if k not in own} == {k: v for k, v in config.items() if k not in own}


COMPARED = {
    **{"model": "Qwen/Qwen3-8B", "revision": "v2", "load_format": "dummy", "served_model_name": "other"},
    **{"context_limit": 4096, "kv_page_size": 64, "endpoint_types": "chat", "tool_call_parser": "hermes"},
    **{"reasoning_parser": "qwen3", "custom_jinja_template": "/models/template.jinja"},
}
"""Keys from which a worker's model card follows, each with another value than the default. Frontends refuse a worker
beside one of another card, or read its answers as that one's card says."""

TUNING = {
    **{"device": "cuda", "dtype": "float16", "gpu_memory_utilization": 0.5, "max_bucket": 8, "max_step_tokens": 512},
    **{"pipeline_depth": 2, "max_queue": 7, "drain_timeout_s": 61, "default_max_tokens": 5, "max_queue_s": 9},
}


def namespace_with(tmp_path: Path, **config: Any) -> str:
    """The Dynamo namespace of rendered workers; the frontend must look for it."""
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"worker": {"config": config}}))
    objects = Render(values=(values,)).objects()
    worker, frontend = (environment(main_container(objects, one)) for one in ("worker", "frontend"))
    found = f"{worker['DYN_NAMESPACE']}-{worker['DYN_NAMESPACE_WORKER_SUFFIX']}"
    assert found.startswith(frontend["DYN_NAMESPACE_PREFIX"])
    return found


@pytest.mark.parametrize("size", [16, 64])
def test_a_page_size_stands_in_the_namespace(size: int, tmp_path: Path) -> None:
    config = load(Render(sets=(f"worker.config.kv_page_size={size}",)).objects(), tmp_path, "plain")
    assert config.kv_page_size == size
    assert config.namespace == namespace_with(tmp_path, kv_page_size=size)
    assert config.namespace.startswith(f"demo-pagelane_page-{size}-")


@pytest.mark.parametrize("key", COMPARED)
def test_workers_that_frontends_would_refuse_beside_each_other_stand_apart(key: str, tmp_path: Path) -> None:
    assert namespace_with(tmp_path, **{key: COMPARED[key]}) != namespace_with(tmp_path)


def test_what_only_tunes_a_worker_leaves_its_namespace_so_that_streams_can_go_over(tmp_path: Path) -> None:
    assert namespace_with(tmp_path, **TUNING) == namespace_with(tmp_path)


def test_a_release_never_sees_the_workers_of_another(tmp_path: Path) -> None:
    """`demo` is the beginning of `demo-2`, but the prefix goes on where no name of Kubernetes can."""
    prefix = environment(main_container(Render(release="demo").objects(), "frontend"))["DYN_NAMESPACE_PREFIX"]
    for other in ("demo-pagelane-2", "demo-page-64", "demo2"):
        assert not load(Render(release=other).objects(), tmp_path, "plain").namespace.startswith(prefix)


def test_a_restarted_container_keeps_the_page_size_of_its_namespace(tmp_path: Path) -> None:
    """The kubelet renews the ConfigMap's file under a pod that has not been replaced yet."""
    old = Render().objects()
    new = Render(sets=("worker.config.kv_page_size=64",)).objects()
    (tmp_path / "worker.yaml").write_text(worker_yaml(new))
    container = main_container(old, "worker")
    arguments = [arg.replace("/etc/pagelane", str(tmp_path)) for arg in container["args"]]
    config = load_config(arguments, environment(container))
    assert config.kv_page_size == 16
    assert config.namespace.startswith("demo-pagelane_page-16-")


@pytest.mark.parametrize("mode", ["plain", "dynamo"])
@pytest.mark.parametrize("key", ["max_queue", "kv_page_size", "drain_timeout_s"])
def test_a_change_of_the_configuration_rolls_the_pods(key: str, mode: str) -> None:
    value = {"max_queue": 7, "kv_page_size": 64, "drain_timeout_s": 61}[key]
    before, after = (
        pod(Render(sets=sets, mode=mode).objects(), "worker")["metadata"]["annotations"]["checksum/config"]
        for sets in ((), (f"worker.config.{key}={value}",))
    )
    assert before != after


def test_what_does_not_concern_the_worker_does_not_roll_it() -> None:
    before, after = (
        pod(Render(sets=s).objects(), "worker") for s in ((), ("frontend.replicas=2", "worker.replicas=3"))
    )
    assert before == after


@pytest.mark.parametrize("name", CASES)
def test_shutdown_times_nest(name: str, tmp_path: Path) -> None:
    path, mode = CASES[name]
    objects = Render(values=(path,), mode=mode).objects()
    config = load(objects, tmp_path, mode)
    container, variables = main_container(objects, "worker"), environment(main_container(objects, "worker"))
    drain = float(variables[GRACE_PERIOD[0]]) + config.drain_timeout_s + CORE_STOP_S + CORE_KILL_S
    assert drain < float(variables[SHUTDOWN_DEADLINE[0]])
    pre_stop = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pre_stop + drain < pod(objects, "worker")["spec"]["terminationGracePeriodSeconds"]


def test_the_chart_knows_the_defaults_of_the_worker() -> None:
    """A key may be left out: what the templates take in its place is what the worker takes."""
    text = "".join(path.read_text() for path in (CHART / "templates").glob("*"))
    taken = dict(re.findall(r"\$?[cC]onfig\.(\w+) \| default \"?(\w+)\"?", text))
    keys = ("kv_page_size", "device", "max_bucket", "max_step_tokens", "request_plane", "load_format", "endpoint")
    assert taken == {"event_plane": "zmq"} | {key: str(FIELDS[key].default) for key in keys}
    assert f"$drain = {FIELDS['drain_timeout_s'].default:.0f}" in text
    assert f'"pagelane.drainSeconds" .) {CORE_STOP_S + CORE_KILL_S:.0f} ' in text


@pytest.mark.parametrize("name", CASES)
def test_the_frontend_takes_its_command_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mode = CASES[name]
    objects = Render(values=(path,), mode=mode).objects()
    container = main_container(objects, "frontend")
    assert container["command"] == ["python3", "-m", "dynamo.frontend"]
    for key, value in environment(container).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "argv", ["dynamo.frontend", *container["args"]])
    config, _, _ = parse_args()
    assert config.http_port == 8000
    assert config.request_plane == "tcp"
    if mode == "plain":
        assert config.discovery_backend == "kubernetes"
        assert config.namespace_prefix == environment(container)["DYN_NAMESPACE_PREFIX"]


def test_the_prefetch_is_a_command(tmp_path: Path) -> None:
    container = pod(Render(values=(EXAMPLES / "cpu-demo.yaml",)).objects(), "worker")["spec"]["initContainers"][0]
    assert container["command"] == ["python3", "-m", "worker.resolve"]
    result = subprocess.run(
        [sys.executable, *container["command"][1:], *container["args"]],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={"PAGELANE_CACHE": str(tmp_path / "pagelane"), "HF_HOME": str(tmp_path / "hub"), "HOME": "/nonexistent"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert list((tmp_path / "pagelane").rglob("config.json")), "nothing was imported into the cache volume"


def test_the_operator_is_told_the_dynamo_that_is_pinned() -> None:
    pinned = re.search(r"^ai-dynamo==(.+)$", (REPOSITORY / ".ci" / "constraints.txt").read_text(), re.MULTILINE)
    components = find(Render(mode="dynamo").objects(), "DynamoGraphDeployment")["spec"]["components"]
    assert pinned is not None
    assert {component["runtimeVersionOverride"] for component in components} == {pinned[1]}


def test_the_autoscaler_asks_for_metrics_that_exist() -> None:
    objects = Render(values=(MORE_VALUES / "statefulset.yaml",)).objects()
    triggers = find(objects, "ScaledObject")["spec"]["triggers"]
    queries = " ".join(trigger["metadata"]["query"] for trigger in triggers)
    ready = Ready(99, 16, 1584, "fingerprint", 1000, "load line", {}, {})
    families = LaneCollector(Sources(Stats, ready, lambda: (0, 0, 0), lambda: 1)).collect()
    samples = [sample for family in families for sample in family.samples]
    asked = re.findall(r'(pagelane_\w+)\{ ?(?:state="(\w+)")?', queries)
    assert len(asked) == 3
    for name, state in asked:
        assert any(sample.name == name and sample.labels.get("state", "") == state for sample in samples), name
