"""Simulated engines that move their KV over RDMA: a stand-in for the device, or a real one."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from tests.fakes.gauges import assert_gauges_return, held
from tests.fakes.patience import eventually
from tests.fakes.rdma import StandIn, attachable
from tests.fakes.rdma_store import NodeBeside, url_of
from tests.tools.sim.conftest import LiveSim

from kvrouter.tools.sim import store_link
from kvrouter.tools.sim.settings import Duration, SimSettings
from kvrouter_store._core import StoreServer
from kvrouter_store.rdma.device import open_device
from kvrouter_store.rdma.initiator import Initiator, Opens

Start = Callable[..., LiveSim]
BLOCK = 16
KV_BYTES = 1024
PROMPT = list(range(100, 200))
LOADABLE = 96


@pytest.fixture(
    params=["stand-in", *(pytest.param(one, marks=pytest.mark.rdma) for one in ("rdma", "beside"))]
)
def where(request: pytest.FixtureRequest) -> str:
    """Over a stand-in; over the device, to a node on this machine or on the one beside it."""
    return str(request.param)


@pytest.fixture
def opens(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opens]:
    if where != "stand-in":
        yield open_device
        return
    with StandIn(tmp_path) as stand_in:
        monkeypatch.setattr(store_link, "Initiator", partial(Initiator, opens=stand_in.open))
        yield stand_in.open


@pytest.fixture
def store(where: str, opens: Opens) -> Iterator[StoreServer | NodeBeside]:
    if where == "beside":
        with contextlib.closing(NodeBeside()) as beside:
            yield beside
        return
    server = StoreServer(pool_bytes=16 << 20, granule_bytes=4096)
    server.start()
    with attachable(server, opens):
        yield server
    server.stop()


@pytest.fixture
def engine(live_sim: Start, store: StoreServer | NodeBeside) -> Start:
    """Starts engines that use the store over RDMA and nothing else."""

    def start(**settings: object) -> LiveSim:
        more = {"kv_bytes_per_token": KV_BYTES, "store_deadline": "20s", **settings}
        return live_sim(store=url_of(store), store_transport="rdma", **more)

    return start


def test_what_one_engine_computed_another_loads_over_rdma(
    engine: Start, live_sim: Start, store: StoreServer | NodeBeside
) -> None:
    before = store.stats()
    prefill, decode = engine(role="prefill"), engine(role="decode")
    prefill.complete(PROMPT, 1)
    alone = live_sim(kv_bytes_per_token=KV_BYTES)
    assert decode.text(PROMPT, 40) == alone.text(PROMPT, 40)
    assert decode.tokens_from("external_kv_transfer") == LOADABLE
    assert decode.metric("kvsim:wrong_blocks_total") == 0
    for one in (prefill, decode):
        assert one.metric("kvsim:store_transport", transport="rdma") == 1
        assert one.metric("kvsim:store_errors_total") == 0
    moved = {name: store.stats()[name] - before[name] for name in before if "bytes_" in name}
    assert moved["bytes_in_total.rdma"] == moved["bytes_in_total"] == LOADABLE * KV_BYTES
    assert moved["bytes_out_total.rdma"] == moved["bytes_out_total"] == LOADABLE * KV_BYTES


def test_an_engine_that_leaves_leaves_nothing(store: StoreServer | NodeBeside) -> None:
    before = held(store)
    with ExitStack() as stack:
        settings = SimSettings(
            model="tiny",
            port=0,
            store=url_of(store),
            store_transport="rdma",
            store_deadline=Duration(20),
        )
        stack.enter_context(LiveSim(settings)).complete(PROMPT, 4)
        assert store.stats()["queue_pairs"] >= 1
    assert_gauges_return(store, before)
    assert eventually(lambda: store.stats()["queue_pairs"] == 0)
