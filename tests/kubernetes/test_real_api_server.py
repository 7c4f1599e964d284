"""Discovery before a real API server, with the rights that deploy/kubernetes gives routers."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fakes.discovery import QUICK
from tests.fakes.pods import pod
from tests.integration.discovery.conftest import Heard, followed
from tests.kubernetes.apiserver import ROUTER, RealApiServer, running

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery.base import MAX_MEMBERS, SourceContext
from kvrouter.membership.discovery.kubernetes import KubernetesSource
from kvrouter.membership.kubernetes.api import Session
from kvrouter.membership.kubernetes.engines import NOTHING
from kvrouter.membership.kubernetes.environment import ServerFinder
from kvrouter.membership.kubernetes.mirror import Expired, Mirror
from kvrouter.membership.kubernetes.objects import Pod

pytestmark = pytest.mark.kubernetes
ACCESS = Path(__file__).parents[2] / "deploy/kubernetes/base/access.yaml"
NAMESPACE = "/api/v1/namespaces/test"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/namespaces/test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealApiServer]:
    with running(tmp_path_factory.mktemp("apiserver")) as started:
        started.ask("POST", "/api/v1/namespaces", {"metadata": {"name": "test"}})
        role = next(
            each for each in yaml.safe_load_all(ACCESS.read_text()) if each["kind"] == "Role"
        )
        started.ask("POST", f"{BINDINGS}/roles", role)
        yield started


@pytest.fixture(autouse=True)
def allowed(server: RealApiServer) -> Iterator[str]:
    """The router may read Pods, and there are none."""
    binding = {
        "metadata": {"name": "router"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role"}
        | {"name": "kvrouter-discovery"},
        "subjects": [{"kind": "User", "name": ROUTER}],
    }
    server.ask("POST", f"{BINDINGS}/rolebindings", binding)
    yield f"{BINDINGS}/rolebindings/router"
    server.ask("DELETE", f"{NAMESPACE}/pods?gracePeriodSeconds=0")
    server.ask("DELETE", f"{BINDINGS}/rolebindings/router")


def put_pod(server: RealApiServer, name: str, ip: str, **more: Any) -> None:
    """A Ready Pod on a node that does not exist, so that it ends when the test says so."""
    made = pod(ip, **more)
    containers = [each | {"image": "none"} for each in made["spec"]["containers"]]
    body = {
        "metadata": made["metadata"] | {"name": name},
        "spec": made["spec"] | {"containers": containers},
    }
    server.ask("POST", f"{NAMESPACE}/pods", body)
    server.ask("PATCH", f"{NAMESPACE}/pods/{name}/status", {"status": made["status"]})


@asynccontextmanager
async def following(
    server: RealApiServer,
    url: str = "k8s://test?selector=app=engine",
    context: SourceContext | None = None,
) -> AsyncIterator[Heard]:
    find = ServerFinder({"KUBECONFIG": str(server.write_kubeconfig(ROUTER))})
    source = KubernetesSource(url, context or SourceContext(), find=find, times=QUICK)
    async with followed(source) as heard:
        yield heard


def names(heard: Heard, *expected: str) -> Callable[[], bool]:
    return lambda: {each.partition("=")[0] for each in heard.members or ()} == set(expected)


async def test_pods_come_change_and_terminate(server: RealApiServer) -> None:
    put_pod(server, "vllm-0", "10.0.0.1", role="prefill")
    async with following(server) as heard:
        await heard.names({"vllm-0=10.0.0.1:8000": Role.PREFILL})
        put_pod(server, "vllm-1", "10.0.0.2", role="decode")
        await heard.until(names(heard, "vllm-0", "vllm-1"))
        away = {"status": pod(ready=False)["status"]}
        server.ask("PATCH", f"{NAMESPACE}/pods/vllm-1/status", away)
        await heard.until(names(heard, "vllm-0"))
        ended = server.ask("DELETE", f"{NAMESPACE}/pods/vllm-0")
        assert ended["metadata"]["deletionTimestamp"], "it is there until its node has ended it"
        await heard.until(names(heard))


async def test_an_engine_belongs_to_the_store_on_its_node(server: RealApiServer) -> None:
    context = SourceContext()
    for n in range(2):
        put_pod(server, f"vllm-{n}", f"10.0.0.{n}", role="decode", host=f"gpu-{n}")
    put_pod(server, "kvstore-x", "10.0.1.1", port=7400, role="store", port_name="kv", host="gpu-1")
    async with following(server, context=context) as heard:
        await heard.until(lambda: len(heard.members or ()) == 3)
        assert dict(context.nodes) == {"10.0.0.1:8000": "kv://10.0.1.1:7400"}


async def test_watches_end_and_go_on(server: RealApiServer) -> None:
    put_pod(server, "vllm-0", "10.0.0.1")
    async with following(server) as heard:
        await heard.until(names(heard, "vllm-0"))
        begun = heard.words
        await heard.until(lambda: heard.words > begun + 2)  # each new watch says a word
        put_pod(server, "vllm-1", "10.0.0.2")
        await heard.until(names(heard, "vllm-0", "vllm-1"))
        assert heard.problem is None


async def test_a_list_comes_in_pages(
    server: RealApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrouter.membership.discovery.kubernetes.PAGE", 3)
    for n in range(7):
        put_pod(server, f"vllm-{n}", f"10.0.0.{n}")
    async with following(server) as heard:
        await heard.until(names(heard, *(f"vllm-{n}" for n in range(7))))


async def test_a_server_before_1_21_has_no_endpoints_that_can_be_followed(
    server: RealApiServer,
) -> None:
    async with following(server, "k8s://test?service=engines&role=decode") as heard:
        assert "answers 404" in await heard.complains()


async def test_without_the_role_the_remedy_is_told_and_with_it_engines_come(
    server: RealApiServer, allowed: str
) -> None:
    put_pod(server, "vllm-0", "10.0.0.1")
    binding = server.ask("GET", allowed)
    server.ask("DELETE", allowed)
    async with following(server) as heard:
        complaint = await heard.complains()
        assert "403" in complaint
        assert "let it list and watch them" in complaint
        del binding["metadata"]["resourceVersion"]
        server.ask("POST", allowed.rpartition("/")[0], binding)
        await heard.until(names(heard, "vllm-0"))


async def test_a_server_that_was_away_is_listed_again(server: RealApiServer) -> None:
    put_pod(server, "vllm-0", "10.0.0.1")
    async with following(server) as heard:
        await heard.until(names(heard, "vllm-0"))
        server.stop()
        await heard.complains()
        assert names(heard, "vllm-0")(), "its engines stay"
        server.start()
        put_pod(server, "vllm-1", "10.0.0.2")
        await heard.until(names(heard, "vllm-0", "vllm-1"))


async def test_a_version_that_the_server_forgot_asks_for_a_list(server: RealApiServer) -> None:
    environment = {"KUBECONFIG": str(server.write_kubeconfig(ROUTER))}
    async with Session(await ServerFinder(environment)(None), answer_s=10) as session:
        with pytest.raises(Expired):
            await watch_from_the_first_version(session)


async def watch_from_the_first_version(session: Session) -> None:
    mirror = Mirror(Pod, lambda _: NOTHING, MAX_MEMBERS)
    query = {"watch": "1", "resourceVersion": "1", "timeoutSeconds": "5"}
    mirror.begin_watch()
    async with session.watch(f"{NAMESPACE}/pods", query, 10) as chunks:
        async for chunk in chunks:
            mirror.feed(chunk)
