"""What the state machine of the whole store plays with: names, bytes, clients on links, a node."""

import contextlib
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.fakes.frames import get_frame
from tests.fakes.link import Address, Link
from tests.fakes.model import Held, Key
from tests.fakes.raw import RawLink
from tests.fakes.store import HASH_BYTES, Memory, chain_of, content_of, manifest_of

from kvrouter_store._core import BlockNames, PostState, RegisterReply, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.lease import Lease, Reservation
from kvrouter_store.errors import LeaseLost, StoreRefused, StoreUnavailable

Kind = Literal["shm", "unix", "tcp"]
ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 30.0
BLOCK = 512
PARTS = 2
CHAIN = 5
SLOTS = 13  # of 30 that would hold everything
GRANULE = 4096
SEEDS = ("a", "b", "c")
CHAINS = {seed: chain_of(CHAIN, seed) for seed in SEEDS}
MANIFEST = manifest_of(BLOCK, parts=PARTS)
KINDS: tuple[Kind, ...] = ("shm", "shm", "unix", "tcp")


def hash_of(seed: str, block: int) -> bytes:
    return CHAINS[seed][block * HASH_BYTES : (block + 1) * HASH_BYTES]


def hashes_of(seed: str, span: range) -> bytes:
    return b"".join(hash_of(seed, block) for block in span)


def bytes_of(key: Key, version: int) -> bytes:
    """What a block holds depends on who put it: whose put counts can be seen."""
    seed, block, part = key
    return content_of(hash_of(seed, block) + bytes((part, version)), BLOCK)


def memory_of(seed: str, part: int, version: int) -> Memory:
    memory = Memory(CHAIN, BLOCK)
    for block in range(CHAIN):
        memory[block] = bytes_of((seed, block, part), version)
    return memory


@dataclass(eq=False)
class Guest:
    """A client behind a link that can be cut; what it believes to hold."""

    kind: Kind
    link: Link
    client: StoreClient
    leases: list[tuple[Lease, Held]] = field(default_factory=list)
    reservations: list[tuple[Reservation, list[Key], int]] = field(default_factory=list)
    unaware: bool = False  # it was cut off, still maps the pool, and may write on

    @classmethod
    def arrive(cls, kind: Kind, target: Address, listen_path: Path) -> "Guest":
        link = Link(target, listen_path).start()
        return cls(kind, link, StoreClient(link.url, transport=kind, deadline_s=PATIENCE_S))

    def lent(self) -> int:
        """Slots of a node that lives, which it may write without a request."""
        writers = [channel.writer for channel in self.client.channels() if channel.alive()]
        return sum(writer.stock(BLOCK) for writer in writers if writer is not None)

    def post(self, ids: RegisterReply, key: Key, span: range) -> list[PostState]:
        """Put without a request on every connection that has slots, whether it stands or not.

        key: the seed of the chain, its first block, and the part.
        """
        seed, _, part = key
        memory, hashes = memory_of(seed, part, 0), hashes_of(seed, span)
        parent = hash_of(seed, span.start - 1) if span.start else None
        name = BlockNames(ids.spec_id, ids.part_ids), ids.manifest_id, part, parent, hashes
        return [
            channel.writer.put(channel.pool, *name, memory.segments, span, True)[1]
            for channel in self.client.channels()
            if channel.writer is not None and channel.pool is not None
        ]

    def come_back(self) -> None:
        """Close what it has and start anew."""
        self.client.close()
        self.leases.clear()
        self.reservations.clear()
        self.unaware = False
        self.client = StoreClient(self.link.url, transport=self.kind, deadline_s=PATIENCE_S)

    def give_up_reservations(self) -> None:
        """Try to commit what another life of the node, or of the link, had granted: in vain."""
        for reservation, keys, _ in self.reservations:
            if not keys:
                continue
            memory = Memory(CHAIN, BLOCK)
            try:
                crcs = reservation.fill(memory.segments, [block for _, block, _ in keys])
                statuses = reservation.commit(crcs)
            except (LeaseLost, StoreRefused, StoreUnavailable):
                continue
            raise AssertionError(f"a lost reservation was committed: {statuses}")
        self.reservations.clear()

    def leave(self) -> None:
        self.client.close()
        self.link.close()


@dataclass(eq=False)
class HalfPut:
    """A PUT whose payload stopped somewhere."""

    link: RawLink
    rest: bytes
    part: int
    seed: str
    span: range
    version: int
    intact: bool  # its digests are right
    settled: list[int]  # statuses of the blocks that are decided
    writing: Key | None  # reserved, half come


class Node:
    """A store node in this process, and a witness that reads each part of each block by itself."""

    def __init__(self, folder: str, eviction: str, lends: int) -> None:
        self.path = f"{folder}/s"
        self._eviction = eviction
        self._lends = lends  # slots, to each client on this host
        self.port = 0
        self.server = self._start()

    def _start(self) -> StoreServer:
        server = StoreServer(
            unix_path=self.path,
            port=self.port,
            pool_bytes=SLOTS * GRANULE,
            granule_bytes=GRANULE,
            eviction=self._eviction,
            lend_bytes=self._lends * GRANULE,
            reserve_bytes=SLOTS * GRANULE,  # clients of this process are one client
        )
        server.start()
        self.port = server.port
        self.witness = RawLink(self.path)
        self.ids = self.witness.registered(MANIFEST)
        self.manifest_id = self.ids.manifest_id
        self._part_ids = [self.witness.register(MANIFEST, [part]) for part in range(PARTS)]
        return server

    def restart(self) -> None:
        self.server.stop()
        self.witness.close()
        self.server = self._start()

    def stop(self) -> None:
        self.witness.close()
        self.server.stop()

    def read_all(self) -> dict[Key, bytes]:
        """Everything that can be read, part by part, also of blocks that are not whole."""
        keys = [(s, k, part) for s in SEEDS for k in range(CHAIN) for part in range(PARTS)]
        frames = [
            get_frame(self.witness.next_id(), self._part_ids[part], 0, hash_of(seed, block))
            for seed, block, part in keys
        ]
        answers = self.witness.ask_all(frames)
        return {key: got.payload for key, got in zip(keys, answers, strict=True) if got.payload}


class Doomed:
    """A process that leases and reserves, to be killed."""

    def __init__(self, url: str, leased: str, reserved: str, span: range) -> None:
        command = [sys.executable, "-m", "tests.fakes.holding_client", url, leased, reserved]
        self.reserved = reserved
        self.span = span
        self._process = subprocess.Popen(
            [*command, str(span.start), str(len(span))],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        blocks, *statuses = (int(word) for word in self._process.stdout.readline().split())
        self.leased_blocks, self.statuses = blocks, statuses

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdout.close()
