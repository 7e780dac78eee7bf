"""What tests with a cluster share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s.cluster import Cluster, networked_cluster
from tests.k8s.helm_client import sim_values
from tests.models import tiny_model

pytest.register_assert_rewrite("tests.k8s.served")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model: the frontend uses its tokenizer, the simulated cores nothing of it."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Cluster]:
    """Two frontends that share what they know, and two workers, ready."""
    with networked_cluster() as found:
        found.helm.install(sim_values(tiny, frontend__replicas=2, worker__replicas=2), "--wait", "--timeout", "60s")
        yield found
