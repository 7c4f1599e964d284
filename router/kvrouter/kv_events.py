"""KV events of engines -> the prefix index: who sent it, is anything lost, do the names agree.

`EventLedger` is the pure part; `EventSubscriber` is the ZMQ socket before it. Neither asks an
engine for anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import zmq

from kvrouter.kv_messages import (
    BadMessage,
    Cleared,
    Removed,
    Stored,
    decode_batch,
    decode_sequence,
    decode_tokens,
    low_id,
    low_ids,
)
from kvrouter.prefix_index import block_ids
from kvstore.chain import HASH_BYTES, hash_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvrouter.engine import Engine, HashDomain
    from kvrouter.kv_messages import Event, Id
    from kvrouter.prefix_index import PrefixIndex

TOPIC_PREFIX: Final = "kv@"
MAX_MESSAGE_BYTES: Final = 64 << 20
GATHER_S: Final = 0.005
"""Messages that come within this time are taken in one go: engines send one per step."""
MESSAGES_PER_TURN: Final = 64
"""Messages taken before the loop gets its turn again."""
DEVICE_MEDIA: Final = (None, "GPU")
"""Media that count as an engine's own cache; vLLM says "GPU" on its CPU build too."""

log = logging.getLogger(__name__)


class Naming(StrEnum):
    """How the names in an engine's events relate to the router's own block hashes."""

    UNKNOWN = "unknown"  # no first block of a chain seen yet; taken as they are until one is
    EXACT = "exact"  # they are the low 64 bits of them
    MAPPED = "mapped"  # another hash: each is named anew from its token ids
    FOREIGN = "foreign"  # blocks of another size: they cannot be named, and are left out


@dataclass(slots=True)
class Source:
    """What is known of one engine's events.

    Attributes:
        next_sequence: the number that its next message must have, by its data-parallel rank where
            several are one target.
        naming: see `Naming`.
        domain: the hash domain under which `naming` was learnt.
        names: where MAPPED, the engine's name -> our 32-byte hash, oldest first.
        group: the cache group that counts, learnt from the first full-attention event.
    """

    next_sequence: dict[int, int] = field(default_factory=dict)
    naming: Naming = Naming.UNKNOWN
    domain: HashDomain | None = None
    names: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    group: int | None = None


class EventLedger:
    """Applies messages to the index and keeps count of what could not be applied.

    Args:
        index: is told what engines hold.
        find: the engine of an address `HOST:PORT`, or None.
        domain: the hash domain of the router's own hashes now, or None while unknown.
        max_names: bound of the names kept per engine whose naming is MAPPED.

    Attributes:
        counts: messages, events, gaps, restarts, malformed, unknown_topic, unknown_rank,
            unknown_event, other_medium, other_group, foreign_names, unmapped_blocks: each only
            grows.
    """

    def __init__(
        self,
        index: PrefixIndex,
        find: Callable[[str], Engine | None],
        domain: Callable[[], HashDomain | None],
        max_names: int = 200_000,
    ) -> None:
        self._index = index
        self._find = find
        self._domain = domain
        self._max_names = max_names
        self._sources: dict[Engine, Source] = {}
        self.counts: Counter[str] = Counter()

    def engine_joined(self, engine: Engine) -> None:
        """Nothing yet: its events may have come before."""

    def engine_left(self, engine: Engine) -> None:
        """Forget its names; the index forgets the rest itself."""
        source = self._sources.get(engine)
        if source is not None:
            self._sources[engine] = Source(next_sequence=source.next_sequence)

    def forget(self, engine: Engine) -> None:
        """`engine` will not come back."""
        self._sources.pop(engine, None)

    def naming(self, engine: Engine) -> Naming | None:
        """How its events name blocks, or None if it never sent any."""
        source = self._sources.get(engine)
        return source.naming if source else None

    def receive(self, frames: Sequence[bytes]) -> None:
        """Apply one message. Never raises: what is wrong is counted and, once, logged."""
        try:
            if len(frames) != 3:
                raise BadMessage(f"{len(frames)} frames")
            server = self._sender(frames[0])
            if server is None:
                return
            sequence, batch = decode_sequence(frames[1]), decode_batch(frames[2])
        except (BadMessage, UnicodeDecodeError) as error:
            self._count("malformed", "KV events: malformed message (%s)", error)
            return
        engine = server.numbered(batch.rank)
        if engine is None:
            message = "KV events of %s: it has no data-parallel rank %d"
            self._count("unknown_rank", message, server.address, batch.rank)
            return
        self.counts["messages"] += 1
        self.counts["events"] += len(batch.events)
        if batch.unknown:
            self.counts["unknown_event"] += batch.unknown
        source = self._sources.setdefault(engine, Source())
        source = self._follow(engine, source, batch.rank, sequence)
        for event in batch.events:
            self._apply(engine, source, event)

    def _sender(self, topic: bytes) -> Engine | None:
        name = topic.decode()
        address = name.removeprefix(TOPIC_PREFIX).partition("@")[0]
        engine = self._find(address) if name.startswith(TOPIC_PREFIX) else None
        if engine is None:
            self._count(
                "unknown_topic",
                "KV events: topic %.200r names no engine of this router; set it to kv@HOST:PORT as "
                "under --prefill and --decode",
                name,
            )
        return engine

    def _follow(self, engine: Engine, source: Source, rank: int, sequence: int) -> Source:
        """Notice lost messages and restarts: then what the engine held is no longer known."""
        expected = source.next_sequence.get(rank)
        if expected is not None and sequence != expected:
            restarted = sequence < expected
            self.counts["restarts" if restarted else "gaps"] += 1
            log.warning(
                "KV events of %s: %s (message %d, expected %d): its part of the index starts anew",
                engine.address,
                "publisher restarted" if restarted else "messages were lost",
                sequence,
                expected,
            )
            self._index.clear(engine)
            source = Source(next_sequence={} if restarted else source.next_sequence)
            self._sources[engine] = source
        source.next_sequence[rank] = sequence + 1
        return source

    def _apply(self, engine: Engine, source: Source, event: Event) -> None:
        if isinstance(event, Cleared):
            self._index.clear(engine)
            source.names.clear()
        elif event.medium not in DEVICE_MEDIA:
            self.counts["other_medium"] += 1
        elif not self._counts_for(source, event):
            self.counts["other_group"] += 1
        elif isinstance(event, Stored):
            self._stored(engine, source, event)
        else:
            self._removed(engine, source, event)

    def _counts_for(self, source: Source, event: Stored | Removed) -> bool:
        """Whether the event is of the cache group that decides: the first full-attention one.

        Groups of a sliding window drop blocks that a prefix still needs elsewhere, so they say
        nothing about how far a prefix is held (llm-d-router issues 2362 and 2363).
        """
        if isinstance(event, Stored):
            if event.kv_cache_spec_kind not in (None, "full_attention"):
                return False
            if source.group is None:
                source.group = event.group_idx
        return event.group_idx is None or event.group_idx == source.group

    def _stored(self, engine: Engine, source: Source, event: Stored) -> None:
        domain = self._domain()
        if source.domain != domain:
            if source.naming is not Naming.UNKNOWN:
                self._index.clear(engine)
            source.naming, source.domain = Naming.UNKNOWN, domain
            source.names.clear()
        if source.naming is Naming.UNKNOWN and domain is not None and _is_plain_root(event):
            self._learn_naming(engine, source, event, domain)
        if source.naming in (Naming.UNKNOWN, Naming.EXACT):
            self._index.stored(engine, low_ids(event.block_hashes))
            return
        hashes = _own_hashes(source, event, domain) if domain else None
        if hashes is None or len(hashes) != HASH_BYTES * len(event.block_hashes):
            self.counts["unmapped_blocks"] += len(event.block_hashes)
            return
        for place, name in enumerate(event.block_hashes):
            own = hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]
            source.names[low_id(name)] = own
        while len(source.names) > self._max_names:
            source.names.popitem(last=False)
        self._index.credit(engine, hashes)

    def _learn_naming(
        self, engine: Engine, source: Source, event: Stored, domain: HashDomain
    ) -> None:
        """Compare a chain's first blocks with our own hashes of their tokens: once per engine."""
        if event.block_size != domain.block_tokens:
            source.naming = Naming.FOREIGN
            remedy = f"start it with --block-size {domain.block_tokens}"
        else:
            hashes = _own_hashes(source, event, domain)
            if hashes and block_ids(hashes) == low_ids(event.block_hashes):
                source.naming = Naming.EXACT
                return
            source.naming = Naming.MAPPED
            remedy = "start it with --prefix-caching-hash-algo sha256_cbor and no PYTHONHASHSEED"
        self._index.clear(engine)
        self._count(
            "foreign_names",
            "KV events of %s do not name blocks as this router does (%s): %s",
            engine.address,
            source.naming,
            remedy,
        )

    def _removed(self, engine: Engine, source: Source, event: Removed) -> None:
        if source.naming in (Naming.MAPPED, Naming.FOREIGN):
            self._index.removed(engine, _forget(source, event.block_hashes))
        else:
            self._index.removed(engine, low_ids(event.block_hashes))

    def _count(self, name: str, message: str, *args: object) -> None:
        """Count; log the first and then each at a power of two, so that nobody floods the log."""
        self.counts[name] += 1
        if self.counts[name].bit_count() == 1:
            log.warning(message + " (%d so far)", *args, self.counts[name])


class EventSubscriber:
    """A bound SUB socket on the running loop; engines connect their publishers to it.

    A watcher of the pool: data-parallel ranks publish each to a port of its own, the endpoint's
    plus their number (`ZmqEventPublisher.offset_endpoint_port` of vLLM and SGLang). Those ports are
    bound when an engine that has them joins, and stay.

    Args:
        endpoint: tcp://HOST:PORT (port 0 takes a free one) or ipc:///PATH.
        ledger: is given every message.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, endpoint: str, ledger: EventLedger) -> None:
        self._ledger = ledger
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 100_000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SUBSCRIBE, TOPIC_PREFIX.encode())
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            self._socket.bind(endpoint.replace(":0", ":*") if endpoint.endswith(":0") else endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"--kv-events-bind {endpoint}: {error.strerror}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._numbers = {0}
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._drain()

    def engine_joined(self, engine: Engine) -> None:
        """Listen where its events come to; a port that is taken is logged, and they are lost."""
        number = engine.number
        if number in self._numbers or self._closed or not self.endpoint.startswith("tcp:"):
            return
        self._numbers.add(number)
        host, _, port = self.endpoint.rpartition(":")
        endpoint = f"{host}:{int(port) + number}"
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            log.error(
                "KV events of data-parallel ranks %d cannot be taken at %s: %s; give "
                "--kv-events-bind a port behind which as many are free as there are ranks",
                number,
                endpoint,
                error.strerror,
            )

    def engine_left(self, engine: Engine) -> None:
        """Its publisher may connect again."""

    def close(self) -> None:
        """Stop receiving and free the socket. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.FD)
            if self._timer is not None:
                self._timer.cancel()
            self._context.destroy(linger=0)

    def _wake(self) -> None:
        """Something came: take it a little later, together with what comes until then."""
        self._loop.remove_reader(self._socket.FD)
        self._timer = self._loop.call_later(GATHER_S, self._drain)

    def _drain(self) -> None:
        """Take what has come, until nothing is left: only then is ZMQ's descriptor quiet."""
        for _ in range(MESSAGES_PER_TURN):
            if self._closed:
                return
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._loop.add_reader(self._socket.FD, self._wake)
                return
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                self._ledger.receive(frames)
            except Exception:  # a stop here would leave what is queued until the next message
                log.exception("KV events: a message could not be applied")
        self._timer = self._loop.call_later(0, self._drain)


def _is_plain(event: Stored) -> bool:
    """Whether the event's blocks are named by tokens alone: no adapter, salt or image."""
    return event.lora_id is None and event.lora_name is None and not any(event.extra_keys or ())


def _is_plain_root(event: Stored) -> bool:
    return event.parent_block_hash is None and _is_plain(event)


def _own_hashes(source: Source, event: Stored, domain: HashDomain) -> bytes | None:
    """Our hashes of the event's blocks, or None where they cannot be known."""
    parent = None
    if event.parent_block_hash is not None:
        parent = source.names.get(low_id(event.parent_block_hash))
        if parent is None:
            return None
    if event.block_size != domain.block_tokens or not _is_plain(event):
        return None
    try:
        tokens = decode_tokens(event)
        return hash_tokens(tokens, event.block_size, root=domain.root, parent=parent).data
    except ValueError:
        return None


def _forget(source: Source, names: Iterable[Id]) -> list[int]:
    own = (source.names.pop(low_id(name), None) for name in names)
    return [int.from_bytes(each[-8:], "big") for each in own if each is not None]
