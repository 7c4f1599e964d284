"""Tenants of one node: what each can count on while another stores, leases and connects at will."""

import json
import secrets
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.fakes.store import Memory, StoreProcess, chain_of, manifest_of, put_chain

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import StoreRefused
from kvrouter_store.node.quotas import quota_bytes
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused, quotas_of

pytestmark = pytest.mark.slow
MIB = 1 << 20
BLOCK = 256 << 10
POOL = 32 * MIB
BLOCKS = POOL // BLOCK
MANIFEST = manifest_of(BLOCK)
NAMES = ("research", "batch", "spare")
TOKENS = {name: secrets.token_hex(16) for name in NAMES}
TENANTS = list(TOKENS.items())


@pytest.fixture
def node() -> Iterator[StoreServer]:
    """Half of the pool is research's, a quarter batch's, and the rest is left to spare."""
    quotas = {"research": POOL // 2, "batch": POOL // 4}
    server = StoreServer(pool_bytes=POOL, tenants=TENANTS, quotas=quotas, max_connections=16)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def tenants(node: StoreServer) -> Iterator[dict[str, StoreClient]]:
    with ExitStack() as open_clients:
        yield {
            name: open_clients.enter_context(
                StoreClient(f"kv://127.0.0.1:{node.port}", token=TOKENS[name])
            )
            for name in NAMES
        }


def put_singly(client: StoreClient, blocks: int, seed: str) -> int:
    """Put so many chains of one block; how many were stored."""
    return sum(put_chain(client, MANIFEST, chain_of(1, f"{seed}{i}")) for i in range(blocks))


def there(client: StoreClient, blocks: int, seed: str) -> int:
    """How many of these chains are in the store."""
    return sum(client.match(MANIFEST, chain_of(1, f"{seed}{i}")).blocks == 1 for i in range(blocks))


def used_blocks(node: StoreServer, tenant: str) -> int:
    return node.stats()[f"tenant_used_bytes.{tenant}"] // BLOCK


def test_a_quota_is_kept_whatever_another_stores(
    node: StoreServer, tenants: dict[str, StoreClient]
) -> None:
    assert put_singly(tenants["research"], BLOCKS // 2, "r") == BLOCKS // 2
    for storm in ("batch", "spare"):
        assert put_singly(tenants[storm], 2 * BLOCKS, storm) == 2 * BLOCKS
    assert there(tenants["research"], BLOCKS // 2, "r") == BLOCKS // 2
    stats = node.stats()
    assert stats["tenant_evictions_total.research"] == 0
    assert stats["tenant_evictions_total.spare"] > BLOCKS
    assert used_blocks(node, "batch") == used_blocks(node, "spare") == BLOCKS // 4


def test_what_a_quota_does_not_use_is_lent_and_taken_back(
    node: StoreServer, tenants: dict[str, StoreClient]
) -> None:
    assert put_singly(tenants["spare"], BLOCKS, "s") == BLOCKS
    assert there(tenants["spare"], BLOCKS, "s") == BLOCKS
    for blocks in range(4, BLOCKS // 2 + 1, 4):
        assert put_singly(tenants["research"], blocks, "r") >= 4
        assert used_blocks(node, "research") == blocks
        assert used_blocks(node, "spare") == BLOCKS - blocks
    assert put_singly(tenants["batch"], BLOCKS, "b") == BLOCKS
    assert used_blocks(node, "spare") == BLOCKS // 4
    assert node.stats()["tenant_evictions_total.research"] == 0


def test_leases_of_one_tenant_cannot_keep_another_from_its_quota(
    node: StoreServer, tenants: dict[str, StoreClient]
) -> None:
    spare, research = tenants["spare"], tenants["research"]
    hashes = chain_of(BLOCKS // 8)
    for seed in "abcdefgh":  # of all the pool
        assert put_chain(spare, MANIFEST, chain_of(BLOCKS // 8, seed)) == BLOCKS // 8
    with ExitStack() as held:
        held.enter_context(spare.acquire(MANIFEST, hashes))
        with pytest.raises(StoreRefused, match="hold more blocks than it may") as refused:
            held.enter_context(spare.acquire(MANIFEST, chain_of(BLOCKS // 8, "b")))
        assert refused.value.status == "LIMIT"
        memory = Memory(BLOCKS // 8, BLOCK)
        with pytest.raises(StoreRefused, match="hold more blocks than it may"):
            spare.get_into(MANIFEST, 0, chain_of(16, "b"), range(16), memory.segments, range(16))
        assert put_singly(research, BLOCKS, "r") == BLOCKS
        assert used_blocks(node, "research") == BLOCKS // 2
        assert spare.match(MANIFEST, hashes).blocks == BLOCKS // 8  # what is leased stays
    assert node.stats()["tenant_held_bytes.spare"] == 0
    assert node.stats()["tenant_limited_total.spare"] == 2
    with spare.acquire(MANIFEST, hashes) as lease:
        assert lease.blocks == BLOCKS // 8


def test_a_wait_that_lands_beyond_what_may_be_held_lands_without_its_lease(
    node: StoreServer, tenants: dict[str, StoreClient]
) -> None:
    batch = tenants["batch"]
    for seed in "ab":
        put_chain(batch, MANIFEST, chain_of(BLOCKS // 4, seed))
    with batch.acquire(MANIFEST, chain_of(BLOCKS // 4)):
        landing = batch.wait(MANIFEST, chain_of(BLOCKS // 4, "b"), 1, deadline_s=5, lease=True)
        assert landing.landed
        assert landing.lease is not None
        assert not landing.lease.held
        assert node.stats()["leases"] == 1
    assert node.stats()["tenant_limited_total.batch"] == 1


def test_a_chain_that_is_longer_than_a_quota_is_stored_as_far_as_it_goes(
    tenants: dict[str, StoreClient],
) -> None:
    hashes = chain_of(BLOCKS // 2)
    memory, span = Memory(BLOCKS // 2, BLOCK).holds(hashes), range(BLOCKS // 2)
    got = tenants["batch"].put(MANIFEST, 0, hashes, span, memory.segments, span).statuses
    whole = BLOCKS // 4
    assert list(got) == [BlockStatus.STORED] * whole + [BlockStatus.NO_SPACE] * whole
    assert put_chain(tenants["research"], MANIFEST, hashes) == BLOCKS // 2


def test_one_tenant_has_half_of_the_connections_at_most(
    node: StoreServer, tenants: dict[str, StoreClient]
) -> None:
    def connect(name: str) -> StoreClient:
        client = StoreClient(f"kv://127.0.0.1:{node.port}", token=TOKENS[name])
        client.match(MANIFEST, chain_of(1))
        return client

    with ExitStack() as greedy:
        for _ in range(8):
            greedy.enter_context(connect("spare"))
        with pytest.raises(StoreRefused, match="as many connections as it may") as refused:
            connect("spare")
        assert refused.value.status == "LIMIT"
        assert node.stats()["tenant_connections.spare"] == 8
        assert put_chain(tenants["research"], MANIFEST, chain_of(2)) == 2
    with connect("spare") as again:
        assert again.match(MANIFEST, chain_of(1)).blocks == 0


def test_a_tenant_is_told_the_nodes_figures_and_its_own(
    node: StoreServer, tenants: dict[str, StoreClient]
) -> None:
    put_chain(tenants["batch"], MANIFEST, chain_of(3))
    tenants["batch"].match(MANIFEST, chain_of(5))
    told = tenants["batch"].stats()
    assert told["tenant_blocks.batch"] == told["tenant_hits_total.batch"] == told["blocks"] == 3
    assert told["tenant_misses_total.batch"] == 2
    assert told["tenant_quota_bytes.batch"] == POOL // 4
    assert not [name for name in told if name.endswith((".research", ".spare"))]
    assert node.stats()["tenant_blocks.research"] == 0
    assert "tenant_quota_bytes.spare" not in node.stats()


def test_a_node_with_quotas_as_a_process(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text("".join(f"{name}:{token}\n" for name, token in TENANTS))
    flags = ("--token-file", str(path), "--quota", "research=50%,batch=8MiB")
    with StoreProcess(tmp_path, "32MiB", *flags) as process:

        def ask(where: str) -> str:
            request = urllib.request.Request(process.http_url + where)
            request.add_header("Authorization", f"Bearer {TOKENS['spare']}")
            with urllib.request.urlopen(request, timeout=20) as answer:
                return str(answer.read().decode())

        with (
            StoreClient(process.url, token=TOKENS["research"]) as research,
            StoreClient(process.url, token=TOKENS["spare"]) as spare,
        ):
            assert put_singly(research, 8, "r") == 8
            assert put_singly(spare, BLOCKS, "s") == BLOCKS
            assert there(research, 8, "r") == 8
        lines = (line.rsplit(" ", 1) for line in ask("/metrics").splitlines())
        samples = {name: float(value) for name, value in lines if name.startswith("kvstore:")}
        assert samples['kvstore:tenant_quota_bytes{tenant="research"}'] == 16 * MIB
        assert samples['kvstore:tenant_used_bytes{tenant="research"}'] == 8 * BLOCK
        assert samples['kvstore:tenant_hits_total{tenant="research"}'] == 8
        assert samples['kvstore:tenant_blocks{tenant="spare"}'] == BLOCKS - 8
        assert json.loads(ask("/stats"))["tenant_quota_bytes.batch"] == 8 * MIB


@pytest.mark.parametrize(
    "written",
    [
        ["a=1GiB", "b=25%"],
        "a=1GiB,b=25%",
        "a=1GiB b=25.0%",
        ["a=1024MiB b=2GiB"],
        {"a": "1GiB", "b": "25%"},
        {"a": 1 << 30, "b": "2GiB"},
    ],
)
def test_quotas_are_written_as_sizes_or_in_percent(written: object) -> None:
    settings = StoreSettings.model_validate({"memory": "8GiB", "quota": written})
    quotas = quotas_of(settings, [("a", "x"), ("b", "y"), ("c", "z")])
    assert quotas == {"a": 1 << 30, "b": 2 << 30}
    assert quota_bytes([], MIB) == {}


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("a", "'a' is not understood; write TENANT=SIZE"),
        ("a b=1GiB", "'a' is not understood"),
        ("a=", "not understood"),
        ("a=much", "not understood"),
        ("a=1.5.5GiB", "not understood"),
        ("a=-1GiB", "not understood"),
        ("a=1XB", "not understood"),
        ("a=5GiB,b=4GiB", "the quotas are 9.0GiB, more than the pool of 8.0GiB"),
        ("a=101%", "more than the pool"),
        ("a=1GiB,a=1GiB", "tenant 'a' has two quotas"),
        ("a=0%", "less than 1MiB"),
        (7, "write TENANT=SIZE"),
        ([7], "write TENANT=SIZE"),
    ],
)
def test_a_quota_that_is_wrong_is_told_with_the_remedy(written: object, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        StoreSettings.model_validate({"memory": "8GiB", "quota": written})


def test_quotas_of_nobody_and_quotas_that_leave_nothing_are_refused() -> None:
    settings = StoreSettings.model_validate({"memory": "8GiB", "quota": "a=4GiB,b=4GiB"})
    for tenants, told in (
        ([], "names tenant 'a', and --token-file does not"),
        ([("a", "x")], "names tenant 'b', and --token-file does not"),
        ([("a", "x"), ("b", "y"), ("c", "z")], "leave nothing of the pool for tenant 'c'"),
    ):
        with pytest.raises(StartRefused, match=told):
            quotas_of(settings, tenants)
    assert quotas_of(settings, [("a", "x"), ("b", "y")]) == {"a": 4 << 30, "b": 4 << 30}


@pytest.mark.parametrize("quotas", [{"nobody": MIB}, {"research": POOL + 1}])
def test_a_server_refuses_quotas_that_cannot_be(quotas: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="quota"):
        StoreServer(pool_bytes=POOL, tenants=TENANTS, quotas=quotas)
