"""Whether a node offers RDMA, what it says where it does not, and what engines say to that."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize, ValidationError
from tests.fakes.rdma import StandIn
from tests.fakes.rdma_store import RdmaStore
from tests.fakes.store import Memory, chain_of, manifest_of, put_chain

from kvrouter.tools.sim.settings import SimSettings
from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.settings import ConnectorRefused, ConnectorSettings
from kvrouter_store.errors import StoreUnavailable
from kvrouter_store.node.rdma_host import serving_rdma
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused
from kvrouter_store.rdma.base import RdmaUnavailable
from kvrouter_store.rdma.initiator import Initiator
from kvrouter_store.rdma.options import RdmaOptions
from kvrouter_store.rdma.ports import SYSFS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent.parent
TENANTS = [("one", "the token of one"), ("two", "the token of two")]
MANIFEST = manifest_of()
without_device = pytest.mark.skipif(
    SYSFS.exists(), reason="an RDMA device: run on a machine without"
)


@pytest.fixture
def node() -> Iterator[StoreServer]:
    made = StoreServer(pool_bytes=1 << 20)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    with StandIn(tmp_path) as made:
        yield made


def no_device(options: RdmaOptions, rank: int) -> Any:
    raise RdmaUnavailable("this machine has no RDMA device: load its driver")


def settings_with(**given: Any) -> StoreSettings:
    return StoreSettings(memory=ByteSize(1 << 20), **given)


def offers(node: StoreServer, stand_in: StandIn) -> bool:
    """Whether a client that demands RDMA gets it."""
    url, rdma = f"kv://127.0.0.1:{node.port}", Initiator(opens=stand_in.open)
    with StoreClient(url, transport="rdma", rdma=rdma, deadline_s=5) as client:
        try:
            return put_chain(client, MANIFEST, chain_of(2)) >= 0
        except StoreUnavailable as error:
            return "offers no RDMA" not in str(error)


@pytest.mark.parametrize("wanted", ["auto", "on"])
def test_a_node_with_a_device_offers_it_while_it_serves(
    node: StoreServer, stand_in: StandIn, wanted: str
) -> None:
    with serving_rdma(node, settings_with(rdma=wanted), [], stand_in.open):
        assert offers(node, stand_in)
    assert not offers(node, stand_in)
    assert stand_in.opened[0].registrations == set()


def test_a_node_that_is_told_so_opens_no_device(node: StoreServer, stand_in: StandIn) -> None:
    with serving_rdma(node, settings_with(rdma="off"), []) as reason:
        assert not offers(node, stand_in)
        assert reason == ""


def test_what_stands_in_the_way_is_one_sentence_or_no_start(
    node: StoreServer, stand_in: StandIn
) -> None:
    with serving_rdma(node, settings_with(), [], no_device) as reason:
        assert not offers(node, stand_in)
        assert reason == "this machine has no RDMA device: load its driver"
    with (
        pytest.raises(StartRefused, match="--rdma on: this machine has no RDMA device"),
        serving_rdma(node, settings_with(rdma="on"), [], no_device),
    ):
        pass


def test_a_pool_that_may_not_be_pinned_is_said_and_the_device_is_closed(
    node: StoreServer, stand_in: StandIn
) -> None:
    stand_in.refuses = lambda length: length > 4096
    with serving_rdma(node, settings_with(), [], stand_in.open) as reason:
        assert not offers(node, stand_in)
        assert "does not register 1048576 bytes" in reason
    assert not stand_in.opened[0].path.exists()


def test_several_tenants_have_no_rdma_and_one_has(node: StoreServer, stand_in: StandIn) -> None:
    with serving_rdma(node, settings_with(), TENANTS, stand_in.open) as reason:
        assert not offers(node, stand_in)
        assert "several tenants: run one for each" in reason
    with (
        pytest.raises(StartRefused, match="several tenants"),
        serving_rdma(node, settings_with(rdma="on"), TENANTS, stand_in.open),
    ):
        pass
    with serving_rdma(node, settings_with(), TENANTS[:1], stand_in.open):
        assert offers(node, stand_in)


def test_beside_tls_rdma_is_only_what_was_asked_for(node: StoreServer, stand_in: StandIn) -> None:
    files = {"tls_cert_file": "cert.pem", "tls_key_file": "key.pem"}
    with serving_rdma(node, settings_with(**files), [], stand_in.open) as reason:
        assert not offers(node, stand_in)
        assert "--rdma on allows it" in reason
    with serving_rdma(node, settings_with(rdma="on", **files), [], stand_in.open):
        assert offers(node, stand_in)


def test_flags_that_cannot_be_meant_are_refused() -> None:
    for given in (
        {"rdma": "maybe"},
        {"ib_port": 0},
        {"link_type": "Token Ring"},
        {"hint_gid_index": -2},
        {"dev_name": "mlx5_0:many"},
    ):
        with pytest.raises(ValidationError):
            settings_with(**given)
    named = settings_with(rdma=True, dev_name="mlx5_1:6,mlx5_2:7", link_type="IB", ib_port=2)
    assert named.rdma == "on"
    assert named.rdma_options == RdmaOptions("mlx5_1:6,mlx5_2:7", 2, "IB")


def test_engines_take_the_same_words() -> None:
    words = {"dev_name": "mlx5_1:6", "ib_port": 2, "link_type": "Ethernet", "hint_gid_index": 3}
    sim = SimSettings(model="m", store_transport="rdma", **words)  # type: ignore[arg-type]
    extra = {"url": "kv://127.0.0.1:7400", "transport": "rdma", **words}
    connector = ConnectorSettings.parse(extra, "kv_both")
    assert sim.rdma_options == connector.rdma_options == RdmaOptions(**words)  # type: ignore[arg-type]
    for wrong in ({"ib_port": "2"}, {"dev_name": 7}, {"link_type": "x"}, {"transport": "pigeon"}):
        with pytest.raises(ConnectorRefused, match="kv_connector_extra_config"):
            ConnectorSettings.parse({**extra, **wrong}, "kv_both")


def ended(*command: str) -> "subprocess.CompletedProcess[str]":
    whole = [sys.executable, "-m", "kvrouter", *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


@without_device
def test_a_node_that_must_have_rdma_and_cannot_exits_with_2() -> None:
    done = ended("store", "--rdma", "on", "--port", "0", "--http-port", "0", "--memory", "1MiB")
    assert done.returncode == 2
    assert "kvrouter store: --rdma on: this machine has no RDMA device" in done.stderr


@without_device
def test_a_simulated_engine_that_must_have_rdma_and_cannot_exits_with_2() -> None:
    store = ("--store", "kv://127.0.0.1:7400")
    done = ended("sim", "--model", "m", "--port", "0", *store, "--transport", "rdma")
    assert done.returncode == 2
    assert "kvrouter sim: --store-transport rdma: this machine has no RDMA device" in done.stderr


def test_a_node_as_it_is_run_offers_rdma(tmp_path: Path) -> None:
    where = f"stand-in:{tmp_path}"
    with RdmaStore(tmp_path, where) as store, StandIn(tmp_path) as stand_in:
        rdma = Initiator(opens=stand_in.open)
        with StoreClient(store.url, transport="rdma", rdma=rdma, deadline_s=10) as client:
            hashes, memory = chain_of(3), Memory(3, 4096)
            assert put_chain(client, MANIFEST, hashes) == 3
            client.get_into(MANIFEST, 0, hashes, range(3), memory.segments, range(3))
            assert memory.data == Memory(3, 4096).holds(hashes).data
        assert store.stop() == 0
    assert "ERROR" not in store.log


def test_as_many_connections_have_a_queue_pair_as_was_said(
    node: StoreServer, stand_in: StandIn
) -> None:
    settings = settings_with(rdma_connections=1)
    with serving_rdma(node, settings, [], stand_in.open):
        url = f"kv://127.0.0.1:{node.port}"
        rdma = Initiator(opens=stand_in.open)
        with StoreClient(url, transport="rdma", rdma=rdma, deadline_s=5) as first:
            put_chain(first, MANIFEST, chain_of(2))
            second = Initiator(opens=stand_in.open)
            with (
                StoreClient(url, transport="rdma", rdma=second, deadline_s=5) as client,
                pytest.raises(StoreUnavailable),
            ):
                put_chain(client, MANIFEST, chain_of(2))
