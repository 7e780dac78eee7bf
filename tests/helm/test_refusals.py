"""Values that cannot be right are refused before they reach a cluster, with the thing, both numbers and the way out."""

import pytest

from tests.helm.chart import CHART, Refused, Render, run_helm

pytestmark = pytest.mark.helm

BY_SCHEMA = [
    (["worker.config.kv_page_size=32"], "at '/worker/config/kv_page_size': value must be one of 16, 64"),
    (["worker.config.kv_page_sise=16"], "at '/worker/config': additional properties 'kv_page_sise' not allowed"),
    (["worker.config.max_bucket=0"], "at '/worker/config/max_bucket': minimum: got 0, want 1"),
    (["worker.config.gpu_memory_limit=24Gi"], "at '/worker/config/gpu_memory_limit': '24Gi' does not match pattern"),
    (["worker.gpu.count=2"], "at '/worker/gpu/count': maximum: got 2, want 1"),
    (["worker.systemPort=40000"], "at '/worker/systemPort': maximum: got 40,000, want 32,767"),
    (["worker.resources.limits.memory=12GiB"], "at '/worker/resources/limits/memory': '12GiB' does not match pattern"),
    (["frontend.replicas=0"], "at '/frontend/replicas': minimum: got 0, want 1"),
    (["frontend.routerMode=kvv"], "at '/frontend/routerMode': value must be one of 'kv'"),
    (["image.pullPolicy=Sometimes"], "at '/image/pullPolicy': value must be one of"),
    (["networkpolicy.enabled=false"], "at '': additional properties 'networkpolicy' not allowed"),
    (["securityContext.runAsUser=0"], "at '/securityContext/runAsUser': minimum: got 0, want 1"),
    (["worker.extraEnv[0].value=x"], "at '/worker/extraEnv/0': missing property 'name'"),
]

BY_TEMPLATE = [
    (
        ["worker.terminationGracePeriodSeconds=60"],
        "worker.terminationGracePeriodSeconds is 60, but a drain takes up to 71: preStopSeconds 2, "
        "gracePeriodSeconds 5, worker.config.drain_timeout_s 60 and 4 to end the engine core; the pod would be killed "
        "while it drains: raise "
        "worker.terminationGracePeriodSeconds above 71, leave it null, or lower worker.config.drain_timeout_s",
    ),
    (
        ["worker.config.drain_timeout_s=600", "worker.terminationGracePeriodSeconds=611"],
        "worker.terminationGracePeriodSeconds is 611, but a drain takes up to 611",
    ),
    (
        ["frontend.terminationGracePeriodSeconds=30"],
        "frontend.terminationGracePeriodSeconds is 30, but preStopSeconds 5 and drainSeconds 60 together take 65",
    ),
    (
        ["worker.disaggregation.prefill=2"],
        "worker.disaggregation has 2 workers for prefill and 0 for decode: prompts would be computed and nothing "
        "generated; this version of Pagelane runs both on every worker: remove worker.disaggregation and set "
        "worker.replicas to 2",
    ),
    (
        ["worker.disaggregation.prefill=1", "worker.disaggregation.decode=1"],
        'worker.disaggregation is {"decode":1,"prefill":1}, but this version of Pagelane runs prefill and decode on '
        "every worker",
    ),
    (
        ["worker.config.namespace=mine"],
        'worker.config.namespace is "mine", but the chart sets it so that frontends find the workers: remove it, and '
        "set dynamoNamespace instead",
    ),
    (["worker.config.discovery_backend=etcd"], 'worker.config.discovery_backend is "etcd", but the chart sets it'),
    (["worker.config.component=x"], 'worker.config.component is "x", but the chart sets it'),
    (
        ["worker.config.device=cpu"],
        "worker.gpu.count is 1 and worker.config.device is cpu: the GPU would lie idle; set worker.gpu.count to 0",
    ),
    (["worker.gpu.count=0"], "worker.gpu.count is 0 and worker.config.device is cuda: the worker would find no GPU"),
    (
        ["worker.config.max_step_tokens=128"],
        "worker.config.max_step_tokens is 128 and worker.config.max_bucket is 256, but a step must hold one token of "
        "every active request: raise max_step_tokens or lower max_bucket",
    ),
    (
        ["worker.config.max_chunk_tokens=4096"],
        "worker.config.max_chunk_tokens is 4096 and worker.config.max_step_tokens is 2048",
    ),
    (["model.source=pvc"], "model.source is pvc, but model.pvc.claimName is empty"),
    (
        ["model.source=pvc", "model.pvc.claimName=models", "worker.config.model=/modelsx/qwen"],
        'worker.config.model is "/modelsx/qwen" and model.pvc.mountPath is "/models", but the model must lie on the '
        "volume",
    ),
    (["worker.config.model=/models/qwen"], 'worker.config.model is "/models/qwen", a path, and model.source is hub'),
    (["model.cache.perWorker=true"], "model.cache.perWorker is true with mode plain and worker.kind Deployment"),
    (
        ["model.cache.perWorker=true", "worker.kind=StatefulSet", "model.cache.claimName=x"],
        'model.cache.claimName is "x" and model.cache.perWorker is true',
    ),
    (
        ["mode=dynamo", "worker.systemPort=9091"],
        "worker.systemPort is 9091, but the operator of mode dynamo takes 9090",
    ),
    (["mode=dynamo", "frontend.port=8080"], "frontend.port is 8080, but the operator of mode dynamo takes 8000"),
    (
        ["mode=dynamo", "worker.config.endpoint=chat"],
        'worker.config.endpoint is "chat", but the operator of mode dynamo has /health tell of generate: remove it',
    ),
    (["mode=dynamo", "worker.kind=StatefulSet"], "worker.kind is StatefulSet, but with mode dynamo the operator"),
    (["mode=dynamo", "monitoring.scrape=service"], "monitoring.scrape is service, but with mode dynamo"),
    (
        ["worker.autoscaling.enabled=true", "worker.autoscaling.minReplicas=9"],
        "worker.autoscaling.minReplicas is 9 and maxReplicas is 4: raise maxReplicas or lower minReplicas",
    ),
    (["worker.maxSurge=0"], "worker.maxSurge and worker.maxUnavailable are both 0: no worker could ever be replaced"),
    (
        ["worker.extraEnv[0].name=DYN_TCP_RPC_PORT", "worker.extraEnv[0].value=x"],
        "worker.extraEnv sets DYN_TCP_RPC_PORT, which is set already: remove it, or use the value of the chart that "
        "it comes from",
    ),
    (
        ["frontend.extraEnv[0].name=A", "frontend.extraEnv[1].name=A"],
        "frontend.extraEnv sets A, which is set already",
    ),
    (
        ["worker.extraVolumes[0].name=cache"],
        "worker.extraVolumes has a volume named cache, as the chart has: give it another name",
    ),
    (
        ["worker.extraArgs={--kv-page-size=64}"],
        "worker.extraArgs has --kv-page-size=64, but other objects of the chart follow from it: remove it, and set "
        "worker.config.kv_page_size",
    ),
    (["worker.extraArgs={--namespace,x}"], "worker.extraArgs has --namespace, but other objects of the chart follow"),
    (["worker.rpcPort=9090"], "worker.systemPort and worker.rpcPort are both 9090: give them two ports"),
    (["frontend.port=9345"], "frontend.port and frontend.responseStreamPort are both 9345: give them two ports"),
]


@pytest.mark.parametrize(("sets", "words"), BY_SCHEMA, ids=lambda part: part[0] if isinstance(part, list) else "")
def test_schema(sets: list[str], words: str) -> None:
    with pytest.raises(Refused) as refusal:
        Render(sets=tuple(sets)).text()
    assert words in str(refusal.value)
    assert "don't meet the specifications of the schema(s)" in str(refusal.value)


@pytest.mark.parametrize(("sets", "words"), BY_TEMPLATE, ids=lambda part: part[0] if isinstance(part, list) else "")
def test_template(sets: list[str], words: str) -> None:
    with pytest.raises(Refused) as refusal:
        Render(sets=tuple(sets)).text()
    assert f": {words}" in str(refusal.value)


def test_a_wrong_value_fails_lint_too() -> None:
    with pytest.raises(Refused):
        run_helm("lint", "--strict", str(CHART), "--set", "worker.config.kv_page_size=32")


def test_a_kubernetes_that_is_too_old_is_refused() -> None:
    with pytest.raises(Refused) as refusal:
        Render(kube_version="1.29.9").text()
    assert "requires kubeVersion: >=1.30.0-0" in str(refusal.value)
