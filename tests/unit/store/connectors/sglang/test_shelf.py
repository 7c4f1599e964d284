"""Pages in the store by SGLang's keys: what is sent, what it follows, and a store that is away."""

import logging
from hashlib import sha256
from typing import Any, cast

import pytest
from tests.fakes.store_client import FakeClient

from kvrouter_store._core import MAX_HASHES
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.sglang.identity import manifest_of
from kvrouter_store.connectors.sglang.pages import Pages, pages_at
from kvrouter_store.connectors.sglang.shelf import PageShelf, name_of
from kvrouter_store.errors import StoreUnavailable

PAGE_BYTES = 16


def keys_of(count: int) -> list[str]:
    return [sha256(str(k).encode()).hexdigest() for k in range(count)]


KEYS = keys_of(6)


def pages_of(count: int) -> Pages:
    return pages_at([64 * k for k in range(1, count + 1)], [PAGE_BYTES] * count, count, PAGE_BYTES)


class RecordingClient(FakeClient):
    """Remembers what was put after what."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[tuple[list[bytes], range, list[int]]] = []

    def put(  # noqa: PLR0917
        self, manifest: Any, part: int, hashes: bytes, span: range, segments: Any, indices: Any
    ) -> Any:
        chain = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        self.puts.append((chain, span, list(indices)))
        return super().put(manifest, part, hashes, span, segments, indices)


@pytest.fixture
def client() -> RecordingClient:
    return RecordingClient()


@pytest.fixture
def shelf(client: RecordingClient) -> PageShelf:
    manifest = manifest_of(("tiny", "r1"), [PAGE_BYTES], {})
    return PageShelf(StoreLink(cast("Any", client), manifest, logging.getLogger("sglang.kvstore")))


def test_pages_are_put_after_the_page_that_they_follow(
    client: RecordingClient, shelf: PageShelf
) -> None:
    assert shelf.put(KEYS[2:4], KEYS[:2], pages_of(2)) == [True, True]
    ((chain, span, indices),) = client.puts
    assert chain == [name_of(key) for key in KEYS[1:4]]
    assert span == range(1, 3)
    assert indices == pages_of(2).indices


def test_pages_without_a_known_predecessor_begin_a_chain(
    client: RecordingClient, shelf: PageShelf
) -> None:
    shelf.put(KEYS[:2], [], pages_of(2))
    shelf.put(KEYS[2:4], [KEYS[3]], pages_of(2))  # no page follows itself
    assert [span for _, span, _ in client.puts] == [range(2), range(2)]


def test_what_the_store_has_is_not_sent_again(client: RecordingClient, shelf: PageShelf) -> None:
    client.held.update(map(name_of, KEYS[:4]))
    assert shelf.put(KEYS, [], pages_of(6)) == [True] * 6
    ((chain, span, indices),) = client.puts
    assert chain[span.start :] == [name_of(key) for key in KEYS[4:]]
    assert indices == pages_of(6).indices[4:]
    assert shelf.put(KEYS, [], pages_of(6)) == [True] * 6
    assert len(client.puts) == 1


def test_leading_pages_are_counted_up_to_the_first_that_is_missing(
    client: RecordingClient, shelf: PageShelf
) -> None:
    client.held.update(map(name_of, [*KEYS[:3], *KEYS[4:]]))
    assert shelf.leading(KEYS) == 3
    assert shelf.leading(KEYS[3:]) == 0
    assert shelf.leading([]) == 0


def test_more_pages_than_one_question_may_have_are_asked_for_in_several(
    client: RecordingClient, shelf: PageShelf
) -> None:
    keys = keys_of(MAX_HASHES + 10)
    client.held.update(map(name_of, keys[: MAX_HASHES + 3]))
    assert shelf.leading(keys) == MAX_HASHES + 3
    assert client.calls == ["match", "match"]
    client.held.discard(name_of(keys[5]))
    assert shelf.leading(keys) == 5
    assert client.calls == ["match"] * 3


def test_a_corrupt_page_is_no_page_and_is_told(
    client: RecordingClient, shelf: PageShelf, caplog: pytest.LogCaptureFixture
) -> None:
    client.held.update(map(name_of, KEYS[:5]))
    client.corrupt.add(name_of(KEYS[1]))
    assert shelf.get(KEYS, pages_of(6)) == [True, False, True, True, True, False]
    assert "1 pages were corrupt" in caplog.text


def test_without_a_store_nothing_is_there_and_nothing_raises(
    client: RecordingClient, shelf: PageShelf
) -> None:
    client.failure = StoreUnavailable("away")
    assert shelf.leading(KEYS) == 0
    assert shelf.put(KEYS, [], pages_of(6)) == [False] * 6
    assert shelf.get(KEYS, pages_of(6)) == [False] * 6


def test_closing_ends_the_client(client: RecordingClient, shelf: PageShelf) -> None:
    shelf.close()
    shelf.close()
    assert client.closed
