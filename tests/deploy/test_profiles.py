"""Profiles of deploy/docker-compose.yml for real: two routers behind NGINX, and Prometheus."""

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tests.deploy.project import DEPLOY, Project, complete, wait_until

FILES = [DEPLOY / "docker-compose.yml"]
PROMPT = list(range(640))

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@pytest.fixture
def replicas(docker: str) -> Iterator[Project]:
    with Project(docker, FILES, "redis", {"NGINX_PORT": "0"}).up("nginx") as project:
        yield project


def test_two_routers_behind_nginx_know_each_other_and_either_may_die(replicas: Project) -> None:
    assert "router" not in replicas.compose("ps", "--services").split()
    for router in ("router-0", "router-1"):
        wait_until(partial(_connected, replicas, router))
    address = replicas.address("nginx", 80)
    for victim in ("router-0", "router-1"):
        replicas.compose("kill", victim)
        for _ in range(4):
            assert complete(address, "sim", PROMPT, 4)["usage"]["completion_tokens"] == 4
        replicas.compose("up", "--wait", victim)


def _connected(project: Project, router: str) -> bool:
    """Whether a router knows Redis and the other router."""
    page = project.inside(router, "http://127.0.0.1:8000/metrics")
    names = ("redis_connected", "replicas")
    return all(re.search(rf"^kvrouter:{name} 1", page, re.MULTILINE) for name in names)


@pytest.fixture
def observed(docker: str) -> Iterator[Project]:
    port = {"PROMETHEUS_PORT": "0"}
    with Project(docker, FILES, "observability", port).up() as project:
        yield project


def test_prometheus_scrapes_every_process_and_takes_the_rules(observed: Project) -> None:
    url = f"http://{observed.address('prometheus', 9090)}/api/v1"

    def health() -> dict[str, str]:
        targets = _asked(f"{url}/targets")["activeTargets"]
        return {each["labels"]["instance"]: each["health"] for each in targets}

    wait_until(lambda: set(health().values()) == {"up"}, patience_s=90)
    assert {"router", "store"} <= {instance.partition(":")[0] for instance in health()}
    complete(observed.address("router", 8000), "sim", PROMPT, 4)
    query = urllib.parse.urlencode({"query": 'kvrouter:prompt_tokens_total{model="sim"}'})
    wait_until(lambda: _asked(f"{url}/query?{query}")["result"])
    assert _asked(f"{url}/rules")["groups"]


def _asked(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        data: dict[str, Any] = json.load(answer)["data"]
    return data
