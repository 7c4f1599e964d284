"""Kubernetes: watches that end, expire and hang, pages, and what is told of faults."""

import asyncio
from collections import ChainMap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.discovery import QUICK, kubernetes_server
from tests.fakes.kubernetes import KubernetesServer
from tests.fakes.pods import endpoint, endpoint_slice, pod
from tests.integration.discovery.conftest import Heard, followed

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery import kubernetes as source
from kvrouter.membership.discovery.base import SourceContext
from kvrouter.membership.discovery.kubernetes import KubernetesSource

PODS, SERVICE = "k8s://test?selector=app=engine", "k8s://test?service=engines&role=prefill"


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[KubernetesServer]:
    async with kubernetes_server(tmp_path) as started:
        yield started


def following(url: str = PODS, context: SourceContext | None = None) -> KubernetesSource:
    return KubernetesSource(url, context or SourceContext(), times=QUICK)


def names(heard: Heard) -> set[str]:
    return {address.partition("=")[0] for address in heard.members or ()}


async def test_an_engine_has_its_pods_name_as_label(server: KubernetesServer) -> None:
    server.put("pods", "vllm-0", **pod("10.0.0.1", role="prefill"))
    server.put("pods", "other", **pod("10.0.0.9") | {"metadata": {"labels": {"app": "web"}}})
    async with followed(following()) as heard:
        await heard.names({"vllm-0=10.0.0.1:8000": Role.PREFILL})


async def test_a_pod_that_terminates_or_is_not_ready_leaves_at_once(
    server: KubernetesServer,
) -> None:
    for n in range(3):
        server.put("pods", f"vllm-{n}", **pod(f"10.0.0.{n}"))
    async with followed(following()) as heard:
        await heard.until(lambda: len(names(heard)) == 3)
        server.put("pods", "vllm-0", **pod("10.0.0.0", leaving=True))
        server.put("pods", "vllm-1", **pod("10.0.0.1", ready=False))
        await heard.until(lambda: names(heard) == {"vllm-2"})
        server.delete("pods", "vllm-2")
        await heard.until(lambda: names(heard) == set())


async def test_a_pod_that_loses_its_label_leaves(server: KubernetesServer) -> None:
    server.put("pods", "vllm-0", **pod())
    async with followed(following()) as heard:
        await heard.until(lambda: names(heard) == {"vllm-0"})
        server.put("pods", "vllm-0", **pod() | {"metadata": {"labels": {"app": "old"}}})
        await heard.until(lambda: names(heard) == set())


async def test_pods_at_one_address_are_one_engine_for_both_legs(
    server: KubernetesServer,
) -> None:
    server.put("pods", "vllm-0", **pod(role="decode"))
    server.put("pods", "vllm-1", **pod(role="prefill"))
    async with followed(following()) as heard:
        await heard.until(lambda: list(heard.engines.values()) == [Role.BOTH])


async def test_endpoints_of_a_service_are_followed(server: KubernetesServer) -> None:
    server.put("endpointslices", "engines-a", **endpoint_slice(endpoint("10.0.0.1", "vllm-0")))
    async with followed(following(SERVICE)) as heard:
        await heard.names({"vllm-0=10.0.0.1:8000": Role.PREFILL})
        more = endpoint_slice(endpoint("10.0.0.2", "vllm-1"), endpoint("10.0.0.1", "vllm-0"))
        server.put("endpointslices", "engines-b", **more)
        await heard.until(lambda: names(heard) == {"vllm-0", "vllm-1"})
        server.delete("endpointslices", "engines-a")
        gone = endpoint_slice(endpoint("10.0.0.1", "vllm-0", ready=False, terminating=True))
        server.put("endpointslices", "engines-b", **gone)
        await heard.until(lambda: names(heard) == set())


async def test_a_list_comes_in_pages(
    server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "PAGE", 10)
    for n in range(95):
        server.put("pods", f"vllm-{n}", **pod(f"10.0.1.{n}"))
    async with followed(following()) as heard:
        await heard.until(lambda: len(names(heard)) == 95)
    lists = [query for _, query in server.asked if "watch" not in query]
    assert [query.get("limit") for query in lists] == ["10"] * 10


async def test_a_watch_goes_on_where_the_last_one_ended(server: KubernetesServer) -> None:
    async with followed(following()) as heard:
        for n in range(5):
            await server.until_watched()
            server.put("pods", f"vllm-{n}", **pod(f"10.0.0.{n}"))
            await heard.until(lambda n=n: f"vllm-{n}" in names(heard))  # type: ignore[misc]
            server.end_watches()
            await server.until_asked()
    lists = [query for _, query in server.asked if "watch" not in query]
    assert len(lists) == 1
    assert heard.problem is None


async def test_a_bookmark_keeps_a_quiet_watch_young(server: KubernetesServer) -> None:
    server.bookmarks = False  # but for the one below
    async with followed(following()) as heard:
        await server.until_watched()
        for n in range(3):  # of other objects: this watch sees no event
            server.put("endpointslices", f"s-{n}", **endpoint_slice())
        server.bookmark()
        server.end_watches()
        await server.until_asked()
        assert server.asked[-1][1]["resourceVersion"] == "103"
        await heard.names({})


@pytest.mark.parametrize("told", ["status", "event"])
async def test_a_version_that_is_gone_is_listed_again_and_is_no_failure(
    server: KubernetesServer, told: str
) -> None:
    server.put("pods", "vllm-0", **pod("10.0.0.0"))
    async with followed(following()) as heard:
        await heard.until(lambda: names(heard) == {"vllm-0"})
        await server.until_watched()
        server.forgets = told  # type: ignore[assignment]
        server.end_watches()
        # What happens while nobody watches is in the list.
        server.delete("pods", "vllm-0")
        server.put("pods", "vllm-1", **pod("10.0.0.1"))
        await heard.until(lambda: names(heard) == {"vllm-1"})
    assert heard.problem is None


async def test_a_list_whose_next_page_is_gone_begins_again(
    server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "PAGE", 1)
    for n in range(2):
        server.put("pods", f"vllm-{n}", **pod(f"10.0.0.{n}"))
    server.forgets = "list"
    async with followed(following()) as heard:
        await heard.until(lambda: names(heard) == {"vllm-0", "vllm-1"})


async def test_a_server_that_hangs_is_told_and_changes_nothing(server: KubernetesServer) -> None:
    server.put("pods", "vllm-0", **pod())
    quick = source.Times(answer_s=0.2, watch_s=1, grace_s=0.2, first_pause_s=0.02)
    made = KubernetesSource(PODS, SourceContext(), times=quick)
    async with followed(made) as heard:
        await heard.until(lambda: names(heard) == {"vllm-0"})
        server.mood = "hangs"
        server.end_watches()
        assert "does not answer in time" in await heard.complains()
        assert names(heard) == {"vllm-0"}
        server.mood = "answers"
        await heard.until(lambda: heard.problem is None)


async def test_a_watch_that_is_dead_is_noticed(server: KubernetesServer) -> None:
    quick = source.Times(answer_s=2, watch_s=1, grace_s=0.1, first_pause_s=0.02)
    async with followed(KubernetesSource(PODS, SourceContext(), times=quick)) as heard:
        await server.until_watched()
        server.cut_off()
        server.put("pods", "vllm-0", **pod())
        assert "does not answer in time" in await heard.complains()
        await heard.until(lambda: names(heard) == {"vllm-0"})


async def test_a_server_that_is_away_comes_back_with_news(server: KubernetesServer) -> None:
    server.put("pods", "vllm-0", **pod("10.0.0.0"))
    async with followed(following()) as heard:
        await heard.until(lambda: names(heard) == {"vllm-0"})
        await server.stop()
        await heard.until(lambda: "cannot be reached" in (heard.problem or ""))
        server.put("pods", "vllm-1", **pod("10.0.0.1"))
        await server.start()
        await heard.until(lambda: names(heard) == {"vllm-0", "vllm-1"})


async def test_what_the_account_may_not_do_is_told_with_the_remedy(
    server: KubernetesServer,
) -> None:
    server.mood = "refuses"
    async with followed(following()) as heard:
        told = await heard.complains()
    assert "answers 403: pods is forbidden" in told
    assert "let it list and watch them" in told


async def test_a_change_before_an_error_in_one_piece_is_reported(
    server: KubernetesServer,
) -> None:
    async with followed(following()) as heard:
        await server.until_watched()
        server.breaks, server.mood = True, "fails"
        server.put("pods", "vllm-0", **pod())
        await heard.until(lambda: names(heard) == {"vllm-0"})
        assert await heard.complains()


async def test_a_source_that_can_be_listed_and_not_watched_stays_a_problem(
    server: KubernetesServer,
) -> None:
    server.put("pods", "vllm-0", **pod())
    server.mood = "lists"
    async with followed(following()) as heard:
        await heard.until(lambda: names(heard) == {"vllm-0"})
        await heard.complains()
        cleared, listed = heard.cleared, len(server.asked)
        await heard.until(lambda: len(server.asked) > listed + 6)
        assert heard.cleared == cleared
        server.put("pods", "vllm-1", **pod("10.0.0.2"))
        await heard.until(lambda: names(heard) == {"vllm-0", "vllm-1"})
        server.mood = "answers"
        await heard.until(lambda: heard.problem is None)


async def test_a_service_without_a_role_is_left_out_with_the_remedy(
    server: KubernetesServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.put("endpointslices", "engines-a", **endpoint_slice(endpoint("10.0.0.1", "vllm-0")))
    async with followed(following("k8s://test?service=engines")) as heard:
        await heard.names({})
        assert "engines-a is left out: say role= in the URL, or give the Service the label" in (
            caplog.text
        )
        labelled = endpoint_slice(
            endpoint("10.0.0.1", "vllm-0"), labels={"kvrouter/role": "prefill"}
        )
        server.put("endpointslices", "engines-a", **labelled)
        await heard.names({"vllm-0=10.0.0.1:8000": Role.PREFILL})


async def test_odd_pods_are_left_out_and_logged_once(
    server: KubernetesServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with followed(following()) as heard:
        await server.until_watched()
        await heard.until(lambda: heard.words == 1)  # of the watch
        server.put("pods", "odd", **pod("10.0.0.9", role="draft"))
        await heard.until(lambda: heard.words == 2)
        assert "odd is left out" in caplog.text
        for n in range(3):
            await server.until_watched()
            server.put("pods", f"vllm-{n}", **pod(f"10.0.0.{n}"))
        await heard.until(lambda: len(names(heard)) == 3)
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert told == [
        f"discovery {PODS}: odd is left out: label kvrouter/role=draft: write prefill, decode, "
        "both, store"
    ]


async def test_a_watch_that_breaks_after_each_event_is_tried_ever_less_often(
    server: KubernetesServer,
) -> None:
    server.breaks = True
    loop, times = asyncio.get_running_loop(), source.Times(first_pause_s=0.02)
    async with followed(KubernetesSource(PODS, SourceContext(), times=times)) as heard:
        for number in range(6):
            await heard.until(lambda: heard.problem is None and heard.words > 0)
            await server.until_watched()
            server.put("pods", f"vllm-{number}", **pod(f"10.0.0.{number}"))
            assert await heard.complains() == "broken"
            failed = loop.time()
        await server.until_asked()
        assert loop.time() - failed >= 0.02 * 2**5 / 2


@pytest.mark.parametrize("kind", ["pods", "endpointslices"])
async def test_an_engine_belongs_to_the_ready_store_on_its_host(
    server: KubernetesServer, kind: str
) -> None:
    def place(name: str, ip: str, role: str, host: str, *, ready: bool = True) -> None:
        port = ("kv", 7400) if role == "store" else ("http", 8000)
        if kind == "pods":
            made = pod(ip, port[1], port_name=port[0], role=role, host=host, ready=ready)
        else:
            found, labels = endpoint(ip, name, host, ready=ready), {"kvrouter/role": role}
            made = endpoint_slice(found, labels=labels, ports=dict([port]))
        server.put(kind, name, **made)

    place("kvstore-a", "10.0.1.1", "store", "gpu-a")
    for host in "ab":
        place(f"vllm-{host}", f"10.0.0.{ord(host)}", "decode", f"gpu-{host}")
    context = SourceContext()
    url = PODS if kind == "pods" else "k8s://test?service=engines"
    async with followed(following(url, context)) as heard:
        await heard.until(lambda: len(names(heard)) == 3)
        assert dict(context.nodes) == {"10.0.0.97:8000": "kv://10.0.1.1:7400"}
        place("kvstore-a", "10.0.1.1", "store", "gpu-a", ready=False)
        place("kvstore-z", "10.0.1.9", "store", "gpu-a")
        await heard.until(lambda: "kv://10.0.1.9:7400" in (heard.members or ()))
        assert dict(context.nodes) == {"10.0.0.97:8000": "kv://10.0.1.9:7400"}
        place("kvstore-z", "10.0.1.9", "store", "gpu-a", ready=False)
        await heard.until(lambda: "kv://10.0.1.9:7400" not in (heard.members or ()))
        assert dict(context.nodes) == {"10.0.0.97:8000": "kv://10.0.1.9:7400"}  # it writes there


async def test_bootstrap_ports_of_flags_win_over_those_of_annotations(
    server: KubernetesServer,
) -> None:
    for n in range(2):
        annotations = {"kvrouter/bootstrap-port": f"899{n}"}
        server.put("pods", f"vllm-{n}", **pod(f"10.0.0.{n}", annotations=annotations))
    context = SourceContext(bootstrap_ports=ChainMap({"": 8000, "10.0.0.0:8000": 7000}))
    async with followed(following(context=context)) as heard:
        await heard.until(lambda: len(names(heard)) == 2)
        ports = context.bootstrap_ports
        assert [ports["10.0.0.0:8000"], ports["10.0.0.1:8000"], ports[""]] == [7000, 8991, 8000]
        server.delete("pods", "vllm-1")
        await heard.until(lambda: len(names(heard)) == 1)
        assert "10.0.0.1:8000" not in ports
