"""Publishes which blocks a node holds, as KV events of vLLM with whole block names.

What a subscriber has missed is repeated. Where that does not reach back far enough, the node begins
anew: an AllBlocksCleared, and after it all that the node holds.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import zmq

from kvrouter_store._core import BlockChange, StoreServer
from kvrouter_store.events.publisher import COUNT_BITS, EventSockets
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused, TenantToken, is_loopback

MOST_CHANGES = 1 << 16
"""Changes that may wait to be published. After more, all that the node holds is told again."""
LOOK_S = 0.02
"""Between two looks for changes, which also find what clients have posted in shared memory."""
Event = dict[str, Any]
CLEARED: Event = {"type": "AllBlocksCleared"}
REMOVED: Event = {"type": "BlockRemoved", "medium": "STORE"}
STORED: Event = {
    "type": "BlockStored",
    "medium": "STORE",
    "parent_block_hash": None,
    "token_ids": [],  # the node knows of none
    "block_size": 0,
    "lora_id": None,
}
log = logging.getLogger(__name__)


@contextmanager
def publishing_events(
    server: StoreServer, settings: StoreSettings, tenants: Sequence[TenantToken]
) -> Iterator[None]:
    """Publish what the started node holds on the running loop until this ends.

    StartRefused: the endpoints of --kv-events-config cannot be used.
    """
    config = settings.kv_events_config
    if config.address() is None:
        yield
        return
    ends = [each for each in (config.endpoint, config.replay_endpoint) if each]
    _check_readers(settings, tenants, ends)
    try:
        sockets = EventSockets(config.endpoint, config.replay_endpoint, config.buffer_steps)
    except zmq.ZMQError as error:
        reason = zmq.strerror(error.errno or 0)
        raise StartRefused(
            f"--kv-events-config: cannot listen at {' and '.join(ends)}: {reason}; give "
            "tcp://HOST:PORT of this host, each with a port that is free"
        ) from None
    feed = server.offer_feed(MOST_CHANGES)
    restart = partial(server.restart_feed, feed)
    events = BlockEvents(sockets, config.topic or "", restart, server.epoch)
    following = asyncio.create_task(_follow(server, feed, events))
    following.add_done_callback(lambda _: sockets.close())
    try:
        yield
    finally:
        following.cancel()


def _check_readers(
    settings: StoreSettings, tenants: Sequence[TenantToken], ends: Sequence[str]
) -> None:
    """StartRefused where tenants, or hosts that nobody asked to trust, could read the events."""
    if len(tenants) > 1:
        raise StartRefused(
            "--kv-events-config: whoever reaches the port reads the names of all blocks; a node "
            "of several tenants publishes none"
        )
    for end in () if tenants or settings.insecure else ends:
        host = end.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if host and end.startswith("tcp://") and not is_loopback("" if host == "*" else host):
            raise StartRefused(
                f"--kv-events-config: any host that reaches {end} could read the names of blocks: "
                "listen on tcp://127.0.0.1:PORT, or say --insecure where the network is trusted"
            )


async def _follow(server: StoreServer, feed: int, events: "BlockEvents") -> None:
    """Hand changes on until cancelled. If it fails, its end shows routers to ask this node."""
    more = True
    try:
        while True:
            await asyncio.sleep(0 if more else LOOK_S)
            changes, lost, more = server.take_feed(feed)
            events.take(changes, lost=lost, more=more)
    except Exception:
        log.exception("this node publishes no events any more")


class BlockEvents:
    """Makes events of the changes of a node, and sends them.

    restart: has the node tell all that it holds once more.
    epoch: 64 bits that are random at each start of the node.
    """

    def __init__(
        self, sockets: EventSockets, topic: str, restart: Callable[[], None], epoch: int
    ) -> None:
        self._sockets = sockets
        self._topic = topic.encode()
        self._restart = restart
        self._next = epoch >> COUNT_BITS + 1 << COUNT_BITS  # some subscribers take it as signed
        self._beginning = b""  # the number of the last message that cleared everything
        self._encode = msgspec.msgpack.Encoder().encode
        self._anew: list[msgspec.Raw] | None = None  # what follows a beginning, not sent so far
        sockets.on_replay = self._asked
        self._begin()

    def take(self, changes: Sequence[BlockChange], *, lost: bool, more: bool) -> None:
        """Take the next changes: of one name, one state per manifest at most.

        lost: some before these were lost. more: more can be taken already.
        """
        if lost:
            self._begin()
        events = self._events(changes)
        if self._anew is None:
            if events:
                self._send(events)
            return
        # All at once, so that subscribers have a part of it for no longer than they need to read.
        if events:
            self._anew.append(msgspec.Raw(self._encode(events)))
        if not (more or lost):
            told, self._anew = self._anew, None
            self._sockets.kept.clear()
            self._beginning = self._send([CLEARED])
            for each in told:
                self._send(each)

    def _begin(self) -> None:
        """Tell all that the node holds once more."""
        self._anew = []
        self._restart()

    def _asked(self, start: bytes) -> None:
        """Begin anew if what is kept reaches back neither to `start` nor to the last beginning."""
        if self._anew is None and start < self._sockets.kept[0][1] != self._beginning:
            self._begin()

    def _send(self, events: object) -> bytes:
        """Send a message; returns its number."""
        number = self._next.to_bytes(8, "big")
        self._next += 1
        message = [self._topic, number, self._encode([time.time(), events, 0])]
        self._sockets.kept.append(message)
        self._sockets.send(message)
        return number

    def _events(self, changes: Sequence[BlockChange]) -> list[Event]:
        """One event for each manifest and state."""
        names: defaultdict[tuple[bool, bytes], list[bytes]] = defaultdict(list)
        for change in changes:
            names[change.stored, change.manifest].append(change.hash)
        return [
            (STORED if stored else REMOVED) | {"block_hashes": hashes, "manifest": manifest}
            for (stored, manifest), hashes in names.items()
        ]
