"""Puts that come in many pieces: the node is woken for large ones, and for the end of each."""

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.frames import LINE_BYTES, put_frame
from tests.fakes.raw import RawLink
from tests.fakes.store import HASH_BYTES, chain_of, content_of, manifest_of

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, StatusesReply, StoreServer

BLOCK = 640 << 10
BLOCKS = 3
MANIFEST = manifest_of(BLOCK)


def put_of(link: RawLink, manifest_id: int, hashes: bytes) -> bytes:
    """A whole PUT: its frame, and each block with its digest."""
    frame = put_frame(link.next_id(), manifest_id, 0, hashes, BLOCK)
    names = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
    contents = [content_of(name, BLOCK) for name in names]
    lines = [_core.crc32c(data).to_bytes(LINE_BYTES, "little") for data in contents]
    return frame + b"".join(data + line for data, line in zip(contents, lines, strict=True))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), cuts=st.integers(0, 40))
def test_a_large_put_may_come_in_any_pieces(seed: int, cuts: int) -> None:
    node = StoreServer(pool_bytes=8 << 20)
    node.start()
    try:
        with RawLink(node.port) as link:
            chance = random.Random(seed)
            sent = put_of(link, link.register(MANIFEST), chain_of(BLOCKS))
            at = [0, *sorted(chance.randrange(len(sent)) for _ in range(cuts)), len(sent)]
            for begin, end in itertools.pairwise(at):
                link.send(sent[begin:end])
            assert stored(link) == BLOCKS
    finally:
        node.stop()


def test_what_follows_a_large_put_is_answered_at_once(server: StoreServer) -> None:
    with RawLink(server.port) as link:
        manifest_id = link.register(MANIFEST)
        chain = chain_of(BLOCKS)
        for count in range(1, BLOCKS + 1):
            link.send(put_of(link, manifest_id, chain[: count * HASH_BYTES]))
            assert stored(link) == 1  # the others were there
            match = link.ask(_core.encode_match(link.next_id(), manifest_id, chain)).reply
            assert isinstance(match, _core.MatchReply)
            assert match.blocks == count


def test_a_large_put_that_stops_in_the_middle_is_forgotten() -> None:
    node = StoreServer(pool_bytes=8 << 20, frame_deadline_s=0.2)
    node.start()
    try:
        with RawLink(node.port) as link:
            sent = put_of(link, link.register(MANIFEST), chain_of(BLOCKS))
            link.send(sent[: BLOCK // 2])
            try:
                link.receive()
                raise AssertionError("half a put was answered")
            except ConnectionError:
                pass
        assert node.stats()["reserved_blocks"] == 0
    finally:
        node.stop()


def stored(link: RawLink) -> int:
    """How many blocks the reply to a PUT says were stored by it."""
    reply = link.receive().reply
    assert isinstance(reply, StatusesReply)
    return list(reply.statuses).count(BlockStatus.STORED)
