"""Chunks are stored behind those that they follow in a prompt, as far as a lookup told."""

from tests.unit.store.connectors.lmcache.keys import chunk

from kvrouter_store.connectors.lmcache.blobs import ChunkOrder


def test_a_chunk_follows_the_one_before_it_in_the_prompt() -> None:
    order = ChunkOrder()
    order.learn([chunk(k) for k in range(3)])
    assert [order.before(chunk(k)) for k in range(4)] == [None, chunk(0), chunk(1), None]


def test_the_rest_of_a_prompt_changes_nothing_that_is_known_of_its_first_chunk() -> None:
    order = ChunkOrder()
    order.learn([chunk(k) for k in range(3)])
    order.learn([chunk(2), chunk(3)])
    assert order.before(chunk(2)) == chunk(1)
    assert order.before(chunk(3)) == chunk(2)


def test_what_was_learnt_longest_ago_is_forgotten_first() -> None:
    order = ChunkOrder(most=4)
    order.learn([chunk(k) for k in range(4)])
    order.learn([chunk(0), chunk(1)])
    order.learn([chunk(k, "b") for k in range(3)])
    assert order.before(chunk(1)) == chunk(0)
    assert order.before(chunk(2)) is None
    assert order.before(chunk(3)) == chunk(2)
