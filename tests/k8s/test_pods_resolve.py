"""What the reader of pods and the reader of probes make of manifests and answers."""

from copy import deepcopy
from typing import Any

import pytest

from tests.k8s.pods import Identity, Pod, PodError, Probe, Volume, moved, resolve
from tests.k8s.pods_probes import OPERATORS_LIVENESS, Answer, earliest_verdict, latest_verdict

OBJECTS: list[dict[str, Any]] = [
    {"kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"a.yaml": "x: 1", "LEVEL": "info"}},
    {"kind": "Secret", "metadata": {"name": "token"}, "stringData": {"key": "secret"}},
]
TEMPLATE: dict[str, Any] = {
    "spec": {
        "securityContext": {"runAsUser": 65532, "runAsNonRoot": True},
        "terminationGracePeriodSeconds": 40,
        "volumes": [
            {"name": "config", "configMap": {"name": "settings"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "model", "persistentVolumeClaim": {"claimName": "weights"}},
        ],
        "initContainers": [{"name": "first", "command": ["fetch"]}],
        "containers": [
            {
                "name": "main",
                "command": ["serve", "--at=$(IP):1"],
                "args": ["--port=8000", "--config", "/etc/x/a.yaml", "$$(IP)", "$(NOBODY)"],
                "env": [
                    {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "token", "key": "key"}}},
                    {"name": "LEVEL", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "LEVEL"}}},
                    {"name": "URL", "value": "http://$(IP)"},
                    {"name": "SYSTEM", "value": "9090"},
                    {"name": "CACHE", "value": "/tmp/cache"},
                ],
                "envFrom": [{"configMapRef": {"name": "settings"}, "prefix": "P_"}],
                "ports": [{"name": "http", "containerPort": 8000}, {"name": "system", "containerPort": 9090}],
                "volumeMounts": [
                    {"name": "config", "mountPath": "/etc/x/"},
                    {"name": "tmp", "mountPath": "/tmp"},
                    {"name": "model", "mountPath": "/models", "subPath": "qwen", "readOnly": True},
                ],
                "livenessProbe": {"httpGet": {"path": "/live", "port": "system"}, "periodSeconds": 5},
                "lifecycle": {"preStop": {"sleep": {"seconds": 2}}},
                "securityContext": {"readOnlyRootFilesystem": True},
            }
        ],
    }
}


def pod(template: dict[str, Any] = TEMPLATE) -> Pod:
    return resolve(template, OBJECTS, Identity(name="pod-0", ip="10.0.0.7"))


def test_references_become_values() -> None:
    main = pod().main
    assert main.command == [
        *("serve", "--at=10.0.0.7:1", "--port=8000", "--config", "/etc/x/a.yaml", "$(IP)", "$(NOBODY)"),
    ]
    assert main.environment == {
        "P_a.yaml": "x: 1",
        "P_LEVEL": "info",
        "IP": "10.0.0.7",
        "TOKEN": "secret",
        "LEVEL": "info",
        "URL": "http://10.0.0.7",
        "SYSTEM": "9090",
        "CACHE": "/tmp/cache",
    }
    config, tmp, model = main.mounts
    assert (config.path, config.volume.files["a.yaml"], config.read_only) == ("/etc/x", "x: 1", True)
    assert (tmp.volume, tmp.read_only) == (Volume("empty", "tmp"), False)
    assert (model.volume, model.sub_path, model.read_only) == (Volume("claim", "weights"), "qwen", True)
    assert main.probes == {"liveness": Probe("/live", 9090, period=5)}
    assert main.security == {"runAsUser": 65532, "runAsNonRoot": True, "readOnlyRootFilesystem": True}
    assert (main.pre_stop_s, pod().grace_s, [one.command for one in pod().init]) == (2, 40, [["fetch"]])


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("env", 0), {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.x"}}}, "fieldRef status.x has no"),
        (("env", 0), {"name": "A", "valueFrom": {"secretKeyRef": {"name": "n", "key": "k"}}}, "there is no Secret n"),
        (("env", 0), {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "k"}}}, "no key k"),
        (("env", 0), {"name": "A", "value": 1}, "must be a text: quote it"),
        (("env", 0), {"name": "A", "value": "1", "valueFrom": {}}, "both value and valueFrom"),
        (("volumeMounts", 0), {"name": "data", "mountPath": "/d"}, "mounts data, which is no volume of its pod"),
        (("livenessProbe",), {"httpGet": {"path": "/", "port": "admin"}}, "asks port admin; .* http, system"),
        (("livenessProbe",), {"exec": {"command": ["true"]}}, "a probe by exec"),
        (("lifecycle",), {"preStop": {"exec": {"command": ["true"]}}}, "a preStop hook by exec"),
    ],
)
def test_what_a_kubelet_would_refuse_is_refused(path: tuple[Any, ...], value: Any, complaint: str) -> None:
    template = deepcopy(TEMPLATE)
    place = template["spec"]["containers"][0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PodError, match=complaint):
        pod(template)


def test_a_volume_of_nothing_is_refused() -> None:
    template = deepcopy(TEMPLATE)
    template["spec"]["volumes"][0]["configMap"]["name"] = "other"
    with pytest.raises(PodError, match="there is no ConfigMap other"):
        pod(template)


def test_ports_and_paths_move_and_a_port_that_nothing_sets_is_found() -> None:
    main = moved(pod(), {8000: 20001, 9090: 20002}, {"/etc/x": "/run/1", "/tmp": "/run/2"}, {"LEVEL": "debug"}).main
    assert main.command[2:5] == ["--port=20001", "--config", "/run/1/a.yaml"]
    assert (main.environment["SYSTEM"], main.environment["CACHE"]) == ("20002", "/run/2/cache")
    assert main.environment["LEVEL"] == "debug"
    assert main.ports == {"http": 20001, "system": 20002}
    assert main.probes["liveness"].port == 20002
    template = deepcopy(TEMPLATE)
    template["spec"]["containers"][0]["env"][4]["value"] = "9091"
    with pytest.raises(PodError, match="port 9090 is declared, but no word and no variable sets it"):
        moved(pod(template), {8000: 20001, 9090: 20002}, {}, {})


def answers(statuses: str, step: float = 1.0) -> list[Answer]:
    """One answer every `step` seconds: `+` is 200, `-` is 503, `.` takes too long."""
    kinds = {"+": (200, 0.01), "-": (503, 0.01), ".": (200, 4.5)}
    return [Answer(number * step, *kinds[letter]) for number, letter in enumerate(statuses)]


@pytest.mark.parametrize(
    ("statuses", "earliest", "latest"),
    [
        ("++++++++++++", None, None),
        ("++++-+++++++", 4, None),
        ("++++.+++++++", 4, None),
        ("++++--------", 4, 8),
        ("------------", 0, 4),
    ],
)
def test_one_failure_ends_a_worker_of_the_operator(statuses: str, earliest: float | None, latest: float | None) -> None:
    assert earliest_verdict(answers(statuses), OPERATORS_LIVENESS) == earliest
    assert latest_verdict(answers(statuses), OPERATORS_LIVENESS) == latest


@pytest.mark.parametrize(
    ("statuses", "earliest", "latest"),
    [
        ("+-----++++", None, None),
        ("+---------++++++++++", 7, 9),
        ("+-+-+-+-+-+-", None, None),
        ("+-++-++-++", 7, None),
    ],
)
def test_three_failures_in_a_row_count_by_the_kubelets_clock(
    statuses: str, earliest: float | None, latest: float | None
) -> None:
    probe = Probe("/live", 1, period=3, timeout=4, failures=3)
    assert earliest_verdict(answers(statuses), probe) == earliest
    assert latest_verdict(answers(statuses), probe) == latest


def test_a_good_answer_is_enough_for_readiness() -> None:
    probe = Probe("/health", 1, period=5, timeout=4)
    assert earliest_verdict(answers("---+++++++"), probe, good=True) == 3
    assert latest_verdict(answers("---+++++++"), probe, good=True) == 7
    assert earliest_verdict([], probe) is None
