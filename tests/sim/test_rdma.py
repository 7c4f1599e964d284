"""Simulated engines that move their KV over RDMA: a stand-in for the device, or a real one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from tests.fakes.rdma import StandIn, attachable
from tests.fakes.store import eventually
from tests.sim.conftest import LiveSim

from kvrouter.sim import engine as sim_engine
from kvrouter.sim.config import SimSettings
from kvstore._core import StoreServer
from kvstore.rdma.device import open_device
from kvstore.rdma.initiator import Initiator, Opens

Start = Callable[..., LiveSim]
BLOCK = 16
KV_BYTES = 1024
PROMPT = list(range(100, 200))
LOADABLE = 96


@pytest.fixture(params=["stand-in", pytest.param("device", marks=pytest.mark.rdma)])
def opens(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Opens]:
    if request.param == "device":
        yield open_device
        return
    with StandIn(tmp_path) as stand_in:
        monkeypatch.setattr(sim_engine, "Initiator", partial(Initiator, opens=stand_in.open))
        yield stand_in.open


@pytest.fixture
def store(opens: Opens) -> Iterator[StoreServer]:
    server = StoreServer(pool_bytes=16 << 20, granule_bytes=4096)
    server.start()
    with attachable(server, opens):
        yield server
    server.stop()


@pytest.fixture
def engine(live_sim: Start, store: StoreServer) -> Start:
    """Starts engines that use the store over RDMA and nothing else."""

    def start(**settings: object) -> LiveSim:
        url = f"kv://127.0.0.1:{store.port}"
        more = {"kv_bytes_per_token": KV_BYTES, "store_deadline": "20s", **settings}
        return live_sim(store=url, store_transport="rdma", **more)

    return start


def test_what_one_engine_computed_another_loads_over_rdma(
    engine: Start, live_sim: Start, store: StoreServer
) -> None:
    prefill, decode = engine(role="prefill"), engine(role="decode")
    prefill.complete(PROMPT, 1)
    alone = live_sim(kv_bytes_per_token=KV_BYTES)
    assert decode.text(PROMPT, 40) == alone.text(PROMPT, 40)
    assert decode.tokens_from("external_kv_transfer") == LOADABLE
    assert decode.metric("kvsim:wrong_blocks_total") == 0
    for one in (prefill, decode):
        assert one.metric("kvsim:store_transport", transport="rdma") == 1
        assert one.metric("kvsim:store_errors_total") == 0
    stats = store.stats()
    assert stats["bytes_in_total.rdma"] == stats["bytes_in_total"] == LOADABLE * KV_BYTES
    assert stats["bytes_out_total.rdma"] == LOADABLE * KV_BYTES


def test_an_engine_that_leaves_leaves_nothing(store: StoreServer) -> None:
    with ExitStack() as stack:
        settings = SimSettings(
            model="tiny",
            port=0,
            store=f"kv://127.0.0.1:{store.port}",
            store_transport="rdma",
        )
        stack.enter_context(LiveSim(settings)).complete(PROMPT, 4)
        assert store.stats()["queue_pairs"] >= 1
    names = ("queue_pairs", "connections", "reserved_blocks", "fenced_blocks", "leases")
    assert eventually(lambda: not any(store.stats()[name] for name in names))
