"""Two tenants of one node against two dictionaries: neither is ever told of the other."""

import itertools
import json
import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.store import HASH_BYTES, Memory, StoreProcess, chain_of, manifest_of, put_chain

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import StoreUnavailable

BLOCK = 512
CHAIN = 5
HASHES = chain_of(CHAIN)
MANIFEST = manifest_of(BLOCK)
TOKENS = (secrets.token_hex(16), secrets.token_hex(16))
TENANTS = [("one", TOKENS[0]), ("two", TOKENS[1])]
Model = dict[int, bytes]

who = st.integers(0, 1)
spans = st.tuples(st.integers(0, CHAIN - 1), st.integers(1, CHAIN)).map(
    lambda t: range(t[0], min(CHAIN, t[0] + t[1]))
)
steps = st.one_of(
    st.tuples(st.just("put"), who, spans),
    st.tuples(st.sampled_from(["get", "delete", "match", "wait", "lease"]), who, spans),
    st.tuples(st.just("purge"), who, st.just(range(0))),
)


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StoreClient, StoreClient]]:
    path = tmp_path_factory.mktemp("tenants") / "s.sock"
    node = StoreServer(unix_path=str(path), pool_bytes=4 << 20, tenants=TENANTS)
    node.start()
    url = f"kv://127.0.0.1:{node.port}"
    with (
        StoreClient(url, token=TOKENS[0]) as one,
        StoreClient(url, token=TOKENS[1], transport="tcp") as two,
    ):
        yield one, two
    node.stop()


def content(tenant: int, block: int, version: int) -> bytes:
    return bytes([tenant, block, version % 256, version // 256]) * (BLOCK // 4)


def leading(model: Model, span: range) -> int:
    """How many leading blocks of the span can be read."""
    return sum(1 for _ in itertools.takewhile(model.__contains__, span))


def put(client: StoreClient, model: Model, tenant: int, span: range, version: int) -> None:
    memory = Memory(CHAIN, BLOCK)
    for block in span:
        memory[block] = content(tenant, block, version)
    got = client.put(MANIFEST, 0, HASHES, span, memory.segments, span).statuses
    for block, status in zip(span, got, strict=True):
        assert status == (BlockStatus.EXISTS if block in model else BlockStatus.STORED)
        model.setdefault(block, memory[block])


def read(client: StoreClient, model: Model, span: range) -> None:
    memory = Memory(CHAIN, BLOCK)
    got = client.get_into(MANIFEST, 0, HASHES, span, memory.segments, span)
    run = leading(model, span)
    assert got == [BlockStatus.OK] * run + [BlockStatus.MISSING] * (len(span) - run)
    for block in span[:run]:
        assert memory[block] == model[block]


def look(client: StoreClient, model: Model, kind: str, span: range) -> None:
    whole = leading(model, range(CHAIN))
    if kind == "match":
        assert client.match(MANIFEST, HASHES).blocks == whole
    elif kind == "wait":
        assert client.wait(MANIFEST, HASHES, span.stop, deadline_s=0).landed == (whole >= span.stop)
    elif kind == "lease":
        lease = client.acquire(MANIFEST, HASHES)
        assert lease.blocks == whole
        assert lease.release() == (whole > 0)
    else:
        read(client, model, span)


def forget(client: StoreClient, model: Model, kind: str, span: range) -> None:
    named = HASHES[span.start * HASH_BYTES : span.stop * HASH_BYTES]
    count = client.purge() if kind == "purge" else client.delete(MANIFEST, named)
    gone = set(model) if kind == "purge" else set(span) & set(model)
    assert count == len(gone)
    for block in gone:
        del model[block]


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, min_size=30, max_size=60))
def test_each_tenant_sees_what_it_did_itself_and_nothing_else(
    clients: tuple[StoreClient, StoreClient], taken: list[tuple[str, int, range]]
) -> None:
    models: tuple[Model, Model] = ({}, {})
    for client in clients:
        client.purge()
    for version, (kind, tenant, span) in enumerate(taken):
        if kind == "put":
            put(clients[tenant], models[tenant], tenant, span, version)
        elif kind in {"delete", "purge"}:
            forget(clients[tenant], models[tenant], kind, span)
        else:
            look(clients[tenant], models[tenant], kind, span)
    assert clients[0].stats()["blocks"] == len(models[0]) + len(models[1])


def test_several_tenants_get_no_shared_memory_and_say_so_only_where_it_was_insisted_on(
    clients: tuple[StoreClient, StoreClient],
) -> None:
    clients[0].match(MANIFEST, HASHES)
    assert clients[0].transport == "unix"
    with (
        StoreClient(clients[0].url, transport="shm", token=TOKENS[0]) as client,
        pytest.raises(StoreUnavailable, match="transport 'shm' cannot be had"),
    ):
        client.match(MANIFEST, HASHES)


def test_engines_of_one_tenant_are_not_listed_to_another(
    clients: tuple[StoreClient, StoreClient],
) -> None:
    one, two = clients
    one.register(manifest_of(BLOCK, model="secret"), engine="http://one:1")
    one.register(manifest_of(BLOCK * 2), engine="http://one:1", refusal="why")
    assert "secret" in {each.manifest.spec.model for each in one.manifests()}
    assert "secret" not in {each.manifest.spec.model for each in two.manifests()}
    assert len(one.refusals()) == 1
    assert two.refusals() == []


def test_http_purges_and_lists_what_is_the_callers_own(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text("".join(f"{name}:{token}\n" for name, token in TENANTS))
    with StoreProcess(tmp_path, "64MiB", "--token-file", str(path)) as node:

        def ask(which: int, where: str, method: str = "GET") -> dict[str, object]:
            request = urllib.request.Request(node.http_url + where, method=method)
            request.add_header("Authorization", f"Bearer {TOKENS[which]}")
            with urllib.request.urlopen(request, timeout=20) as answer:
                found: dict[str, object] = json.load(answer)
                return found

        with (
            StoreClient(node.url, token=TOKENS[0]) as one,
            StoreClient(node.url, token=TOKENS[1]) as two,
        ):
            for client, blocks in ((one, 3), (two, 5)):
                client.register(MANIFEST, engine="e")
                assert put_chain(client, MANIFEST, chain_of(blocks)) == blocks
            assert ask(0, "/purge", "POST") == {"status": "ok", "num": 3}
            assert one.match(MANIFEST, HASHES).blocks == 0
            assert two.match(MANIFEST, HASHES).blocks == 5
            one.register(manifest_of(BLOCK, model="secret"))
            assert "secret" in json.dumps(ask(0, "/engines"))
            assert "secret" not in json.dumps(ask(1, "/engines"))
