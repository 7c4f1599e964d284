"""A storm of Pods and an API server that fails, under traffic: no request notices."""

import asyncio
import random
from functools import partial
from pathlib import Path

import pytest
from tests.fakes.discovery import QUICK, KubernetesBackend, kubernetes_server
from tests.fakes.engine import FakeEngine
from tests.fakes.kubernetes import KubernetesServer
from tests.fakes.patience import until
from tests.fakes.pd import Network
from tests.fakes.pd_sglang import SglangEngine
from tests.fakes.pods import pod
from tests.integration.router.conftest import Open, Site
from tests.integration.router.test_membership import Traffic, decoding, neighbours

from kvrouter.membership import discovery
from kvrouter.membership.discovery import SOURCES, SourceKind
from kvrouter.membership.discovery.kubernetes import KubernetesSource

EVENTS = 1000
SEED = 20250101


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = partial(KubernetesSource, times=QUICK)
    monkeypatch.setattr(discovery, "SOURCES", {**SOURCES, "k8s": SourceKind(quick, "")})


class Fleet:
    """A Pod for each engine, in the state that was put last."""

    def __init__(self, server: KubernetesServer, engines: list[FakeEngine]) -> None:
        self._server = server
        self._engines = engines
        self.serving: set[str] = set()  # addresses of the Pods that are Ready

    def asked_elsewhere(self) -> int:
        """Requests that engines without a Ready Pod have seen."""
        return sum(len(each.requests) for each in self._engines if not self.serves(each))

    def serves(self, engine: FakeEngine) -> bool:
        return engine.address in self.serving

    async def gone_from(self, here: Site) -> None:
        """Wait until engines without a Ready Pod have ended what they had."""
        find = here.app.core.pool.find
        away = [each.address for each in self._engines if not self.serves(each)]
        await until(lambda: not any(map(find, away)))

    def put(self, at: int, state: str) -> None:
        engine = self._engines[at]
        if state == "gone":
            self._server.delete("pods", f"vllm-{at}")
        else:
            ready, leaving = state != "waits", state == "leaves"
            made = pod(engine.host, engine.port, ready=ready, leaving=leaving)
            self._server.put("pods", f"vllm-{at}", **made)
        (self.serving.add if state == "ready" else self.serving.discard)(engine.address)


async def settled(here: Site, fleet: Fleet) -> None:
    await until(lambda: decoding(here) == fleet.serving)


async def ask_only_ready_ones(here: Site, fleet: Fleet, traffic: Traffic) -> None:
    await settled(here, fleet)
    await fleet.gone_from(here)
    before = fleet.asked_elsewhere()
    await traffic.answers(10)
    assert fleet.asked_elsewhere() == before


async def test_a_thousand_events_and_broken_watches_fail_no_request(
    site: Open, tmp_path: Path
) -> None:
    choose = random.Random(SEED)
    async with neighbours(4) as engines, kubernetes_server(tmp_path) as server:
        fleet = Fleet(server, engines)
        for at in range(4):
            fleet.put(at, "ready")
        here = await site(0, 0, discovery=[KubernetesBackend.setting], engine_wait_s=30)
        await settled(here, fleet)
        async with Traffic(here) as traffic:
            for n in range(EVENTS):
                fleet.put(
                    choose.randrange(1, 4), choose.choice(("ready", "waits", "leaves", "gone"))
                )
                if n % 50 == 49:  # the watch ends, or its version is too old
                    server.forgets = choose.choice(("", "status", "event"))
                    server.end_watches()
                if n % 250 == 249:
                    server.forget()
                if n % 10 == 9:
                    await traffic.answers(1)
                if n % 100 == 99:
                    await ask_only_ready_ones(here, fleet, traffic)
            for at, state in enumerate(("ready", "gone", "leaves", "waits")):
                fleet.put(at, state)
            await ask_only_ready_ones(here, fleet, traffic)
        assert traffic.failed == []
        print(
            f"{EVENTS} events, {traffic.answered} requests, {len(server.asked)} lists and watches"
        )


@pytest.mark.parametrize("fault", ["fails", "hangs", "refuses", "is away", "is cut off"])
async def test_while_the_api_server_is_broken_the_known_engines_serve(
    site: Open, tmp_path: Path, fault: str
) -> None:
    async with neighbours(3) as engines, kubernetes_server(tmp_path) as server:
        fleet = Fleet(server, engines)
        for at in range(2):
            fleet.put(at, "ready")
        here = await site(0, 0, discovery=[KubernetesBackend.setting], engine_wait_s=30)
        await settled(here, fleet)
        before, status = set(fleet.serving), here.app.members.discovery.merged.statuses[1]
        async with Traffic(here) as traffic:
            await broken(server, fault)
            fleet.put(0, "leaves")
            fleet.put(2, "ready")
            await until(lambda: not status.up)
            assert decoding(here) == before
            await traffic.answers(10)
            await mended(server)
            await settled(here, fleet)
            await traffic.answers(10)
        assert traffic.failed == []


async def broken(server: KubernetesServer, fault: str) -> None:
    if fault == "is away":
        await server.stop()
    elif fault == "is cut off":
        server.cut_off()
        server.mood = "hangs"
    else:
        server.mood = fault  # type: ignore[assignment]
        server.end_watches()


async def mended(server: KubernetesServer) -> None:
    server.mood = "answers"
    await server.start()


async def test_a_pod_that_terminates_gets_nothing_new_and_ends_what_it_has(
    site: Open, tmp_path: Path
) -> None:
    async with neighbours(2) as engines, kubernetes_server(tmp_path) as server:
        fleet = Fleet(server, engines)
        for at in range(2):
            fleet.put(at, "ready")
        here = await site(0, 0, discovery=[KubernetesBackend.setting], engine_wait_s=30)
        await settled(here, fleet)
        async with Traffic(here) as traffic:
            leaving = engines[0]
            leaving.mode, leaving.began = "held", asyncio.Queue()
            await leaving.next_began()
            fleet.put(0, "leaves")
            await settled(here, fleet)
            had = len(leaving.requests)
            await traffic.answers(20)
            assert len(leaving.requests) == had
            assert here.app.core.pool.find(leaving.address) is not None
            leaving.go.set()
            await until(lambda: here.app.core.pool.find(leaving.address) is None)
            server.delete("pods", "vllm-0")
        assert traffic.failed == []


async def test_a_prefill_engine_is_found_at_the_port_that_its_pods_annotation_tells(
    site: Open, tmp_path: Path
) -> None:
    network = Network()
    engines = {role: SglangEngine(network, role) for role in ("prefill", "decode")}
    async with kubernetes_server(tmp_path) as server:
        for role, engine in engines.items():
            await engine.start()
            host, _, port = engine.address.rpartition(":")
            annotations = {"kvrouter/bootstrap-port": "9"}
            made = pod(host, int(port), role=role, annotations=annotations)
            server.put("pods", f"sglang-{role}", **made)
        try:
            here = await site(0, 0, discovery=[KubernetesBackend.setting])
            find = here.app.core.pool.find
            await until(lambda: getattr(find(engines["prefill"].address), "identity", None))
            found = find(engines["prefill"].address)
            assert found is not None
            assert found.identity is not None
            assert found.identity.bootstrap is not None
            assert found.identity.bootstrap.port == 9
        finally:
            for engine in engines.values():
                await engine.stop()
