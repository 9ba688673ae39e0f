"""The whole system in the shared Ray cluster: two replicas of the embedded model behind a real endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from satchel.api.client.cluster import Cluster
from satchel.api.serve import Deployment, deploy
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.bring_up.runtime import LocalCluster
from satchel.cluster.config.config import Config, parse_config
from tests.worlds.collector import Collector, collecting

from ..serving import RECALL, give_findings, take_findings

SEQUENCES_MAX = 8
QUEUE_MAX = 12


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Gets the spans of the shared cluster."""
    with collecting() as started:
        yield started


@pytest.fixture(scope="session")
def config(collector: Collector) -> Config:
    return parse_config(
        {
            "models": [{**RECALL, "replicas": 2}],
            "endpoint": {"port": free_port(), "body_bytes_max": "1 MiB"},
            "scheduling": {"sequences_max": SEQUENCES_MAX, "queue_requests_max": QUEUE_MAX},
            # Half of what is usual: two tests wait until it has run out.
            "timing": {"consumer_lease_s": 5.0},
            "logs": {"format": "json"},
            "traces": {"endpoint": collector.url},
        }
    )


@pytest.fixture(scope="session")
def deployment(cluster: LocalCluster, config: Config) -> Deployment:
    give_findings(cluster.home.root)
    deployed = deploy(config, report=lambda what, fraction: None)
    take_findings(cluster.home.root)
    return deployed


@pytest.fixture(scope="session")
def handles(deployment: Deployment) -> Iterator[Cluster]:
    """The Python handles, in this process, which is a driver of the shared cluster."""
    with Cluster() as connected:
        yield connected


@pytest.fixture(scope="session")
def http(deployment: Deployment) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=deployment.url, timeout=60, trust_env=False) as client:
        yield client
