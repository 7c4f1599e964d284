"""An engine goes on without its store, at once, and finds it again."""

import logging
import threading
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.fakes.patience import eventually
from tests.fakes.store_client import FakeClient, chain_of

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.reach import AWAY_S, HEARTBEAT_S
from kvrouter_store.errors import DeadlineExceeded, StoreRefused, StoreUnavailable, Unauthorized
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.layout import Layout

SPEC = CacheSpec("tiny", "r1", "float32", 16, "sha256_cbor", "00" * 32)
MANIFEST = Manifest(SPEC, (Part((0, 4), (0, 2), 0, 4096, Layout.opaque("test")),))
NOWHERE = cast("Any", None)


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def link(client: FakeClient) -> StoreLink:
    log = logging.getLogger("link")
    return StoreLink(cast("Any", client), MANIFEST, log, engine="e1")


def test_without_a_store_nothing_matches_nothing_is_stored_and_every_get_misses(
    client: FakeClient, link: StoreLink
) -> None:
    client.failure = StoreUnavailable("away")
    hashes = b"".join(chain_of(3))
    assert link.match(hashes) == 0
    assert link.put(0, hashes, range(3), NOWHERE, [0, 1, 2]) is None
    assert link.get_into(0, hashes, range(1, 3), NOWHERE, [1, 2]) == [BlockStatus.MISSING] * 2


def test_only_the_first_operation_of_an_outage_waits(client: FakeClient, link: StoreLink) -> None:
    client.failure = DeadlineExceeded("hung")
    for _ in range(5):
        link.match(b"")
    assert client.calls == ["match"]
    assert link.away


def test_a_store_that_wants_another_token_is_as_good_as_away_and_told_once(
    client: FakeClient, link: StoreLink, caplog: pytest.LogCaptureFixture
) -> None:
    client.failure = Unauthorized("it needs a token", "UNAUTHORIZED")
    for _ in range(5):
        assert link.match(b"") == 0
    assert client.calls == ["match"]
    assert caplog.text.count("it needs a token") == 1


def test_the_store_is_used_again_after_a_sign_of_life(
    client: FakeClient, link: StoreLink, caplog: pytest.LogCaptureFixture
) -> None:
    client.held.update(chain_of(2))
    client.failure = StoreUnavailable("away")
    assert not link.beat()
    assert not link.beat()
    client.failure = None
    assert link.match(b"".join(chain_of(2))) == 0
    assert link.beat()
    assert link.match(b"".join(chain_of(2))) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "the store is away, going on without it: away",
        "the store is back",
    ]


def test_an_engine_registers_once_and_says_why_it_shares_nothing(
    client: FakeClient, link: StoreLink
) -> None:
    client.failure = StoreUnavailable("not up yet")
    link.beat()
    client.failure = None
    link.beat()
    link.beat()
    assert client.registered == [("e1", "")]


def test_a_refused_operation_does_not_make_the_store_away(
    client: FakeClient, link: StoreLink
) -> None:
    client.failure = StoreRefused("too many hashes")
    assert link.match(b"") == 0
    assert not link.away


def test_a_store_that_is_away_is_looked_for_more_often_than_one_that_is_there(
    client: FakeClient, link: StoreLink
) -> None:
    pauses: list[float] = []
    for failure in (None, StoreUnavailable("away"), None, StoreUnavailable("away")):
        client.failure = failure
        link.beat()
        pauses.append(link.pause_s)
    assert pauses == [HEARTBEAT_S, AWAY_S, HEARTBEAT_S, AWAY_S]


def test_whatever_ends_a_look_for_the_store_the_next_one_follows(
    client: FakeClient, link: StoreLink, caplog: pytest.LogCaptureFixture
) -> None:
    client.failure = cast("Any", RuntimeError("not foreseen"))
    link.start()
    assert eventually(lambda: link.away)
    client.failure = None
    assert eventually(lambda: not link.away)
    link.close()
    assert "Traceback" in caplog.text


def test_closing_ends_the_thread_and_the_client(client: FakeClient, link: StoreLink) -> None:
    before = threading.active_count()
    link.start()
    link.close()
    assert client.closed
    assert threading.active_count() == before


def test_a_link_that_is_renamed_registers_its_new_manifest(
    client: FakeClient, link: StoreLink
) -> None:
    assert link.beat()
    assert client.calls.count("register") == 1
    link.rename(Manifest(replace(SPEC, weights_revision="r2"), MANIFEST.parts))
    assert link.beat()
    assert link.beat()
    assert client.calls.count("register") == 2


def test_weights_may_change_more_often_than_a_node_lists_manifests(url: str) -> None:
    link = StoreLink(StoreClient(url, transport="tcp"), MANIFEST, logging.getLogger("link"), "e1")
    for change in range(100):
        link.rename(Manifest(replace(SPEC, weights_revision=f"r{change}"), MANIFEST.parts))
        assert link.beat()
    last = link.client.manifests()[-1]
    assert (last.manifest, last.engines) == (link.manifest, ("e1",))
    assert link.client.manifests()[0].engines == ()
    link.close()


def test_a_restarted_node_gets_only_the_latest_manifest_of_a_link() -> None:
    node = StoreServer(pool_bytes=1 << 20)
    node.start()
    link = StoreLink(StoreClient(f"kv://127.0.0.1:{node.port}"), MANIFEST, logging.getLogger("l"))
    assert link.beat()
    link.rename(Manifest(replace(SPEC, weights_revision="r2"), MANIFEST.parts))
    assert link.beat()
    port = node.port
    node.stop()
    assert not link.beat()
    node = StoreServer(pool_bytes=1 << 20, port=port)
    node.start()
    assert eventually(link.beat)
    assert [each.manifest for each in link.client.manifests()] == [link.manifest]
    link.close()
    node.stop()
