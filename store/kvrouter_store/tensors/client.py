"""Puts a KV cache into the store layer by layer while later layers are computed, and loads it.

docs/torch.md has an example.
"""

import queue
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol, Self

from kvrouter_store._core import BlockStatus, Segments
from kvrouter_store.client.results import THERE, PutResult
from kvrouter_store.errors import DeadlineExceeded, StoreClosed
from kvrouter_store.identity.chain import HASH_BYTES
from kvrouter_store.tensors.base import Copier, CopyFailed, NoRoom, Staging
from kvrouter_store.tensors.layers import LayerBlocks

READS = 4  # from the store at a time: one thread copies less than a GPU takes


class Link(Protocol):
    """What is needed of `kvrouter_store.connectors.link.StoreLink`.

    Its operations end within a deadline of their own.
    """

    def put(
        self, part: int, hashes: bytes, span: range, segments: Segments, indices: Sequence[int]
    ) -> PutResult | None:
        """Store one part of the blocks in `span`; None where the store is away."""

    def get_into(
        self, part: int, hashes: bytes, span: range, segments: Segments, indices: Sequence[int]
    ) -> list[BlockStatus]:
        """Read one part of the blocks in `span`; a status for each."""


@dataclass(frozen=True)
class Blocks:
    """Some blocks of one chain: their names, and where they are in the tensors.

    layers: of the whole model, in the order of the manifest's parts. indices: of the blocks in
    `span`, one each. hashes: of the chain from block 0 on, 32 bytes each.
    """

    layers: Sequence[LayerBlocks]
    indices: Sequence[int]
    hashes: bytes
    span: range

    def __post_init__(self) -> None:
        if len(self.indices) != len(self.span) or len(self.hashes) < self.span.stop * HASH_BYTES:
            raise ValueError(f"{self.span} needs as many indices, and hashes from block 0 on")

    def part(self, first: int, stop: int) -> "Blocks":
        """The blocks from place `first` of the span up to `stop`."""
        return Blocks(self.layers, self.indices[first:stop], self.hashes, self.span[first:stop])


@dataclass(frozen=True)
class _Job:
    put: "LayerwisePut"
    layer: int
    first: int  # place in the span
    some: Blocks
    staging: Staging


class TensorClient:
    """Puts and gets for one engine. Owns `copier` and threads; close() ends them.

    Each wait for room in host memory, for a copy or for the last put ends within `deadline_s`
    seconds; operations on the store have the deadline of `link`, which stays the caller's.
    """

    def __init__(self, link: Link, copier: Copier, *, deadline_s: float = 30.0) -> None:
        self.deadline_s = deadline_s
        self._link = link
        self._copier = copier
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._readers = ThreadPoolExecutor(READS, thread_name_prefix="kvstore-tensors-read")
        self._thread = threading.Thread(target=self._run, name="kvstore-tensors", daemon=True)
        self._thread.start()

    def put_tensors(self, blocks: Blocks) -> "LayerwisePut":
        """Begin to put these blocks. Layers follow as they are computed; see `LayerwisePut`."""
        self._check_open()
        return LayerwisePut(self, blocks)

    def get_tensors_into(self, blocks: Blocks) -> int:
        """Load the blocks, layer by layer; how many leading ones came whole and unharmed.

        The memory of those after them holds anything. Raises CopyFailed, NoRoom.
        """
        self._check_open()
        return _Load(self._link, self._copier, self._readers, self.deadline_s, blocks).run()

    def close(self) -> None:
        """Let the puts that wait end, then end the thread and the copier."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join(self.deadline_s)
            self._readers.shutdown()
            if not self._thread.is_alive():  # else it may still read what the copier owns
                self._copier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the tensor client was closed")

    def _begin(self, put: "LayerwisePut", layer: int) -> None:
        """Begin to copy a layer, in the caller's thread; the rest is the own thread's."""
        self._check_open()
        tensors = put.blocks.layers[layer]
        most = self._copier.most_blocks(tensors)
        for first in range(0, len(put.blocks.span), most):
            some = put.blocks.part(first, first + most)
            staging = self._copier.stage(tensors, some.indices, self.deadline_s)
            try:
                staging.fetch()
            except BaseException:
                staging.release()
                raise
            put.begun()
            self._jobs.put(_Job(put, layer, first, some, staging))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)
            del job  # or it would keep a KV cache alive until the next one comes

    def _do(self, job: _Job) -> None:
        there: list[bool] = []
        failure: Exception | None = None
        try:
            there = self._store(job)
        except Exception as error:  # it is raised where the put ends
            failure = error
        finally:
            job.staging.release()
            job.put.ended(job.layer, job.first, there, failure)

    def _store(self, job: _Job) -> list[bool]:
        """Of each block of a job, whether the store has the layer now."""
        if job.put.dropped:
            return []
        job.staging.wait(self.deadline_s)
        some, staging = job.some, job.staging
        wanted = job.layer, some.hashes, some.span, staging.memory.segments, staging.indices
        done = self._link.put(*wanted)
        return [status in THERE for status in done.statuses] if done is not None else []


@dataclass
class _Read:
    first: int  # place in the span
    blocks: int
    staging: Staging
    statuses: Future[list[BlockStatus]]


@dataclass
class _Load:
    """Reads pieces from the store, layer by layer, in threads; those that came are delivered.

    `run` is for one thread, once: what it has queued on a device comes before what is delivered.
    """

    link: Link
    copier: Copier
    readers: ThreadPoolExecutor
    deadline_s: float
    blocks: Blocks
    came: int = 0
    reads: deque[_Read] = field(default_factory=deque)

    def run(self) -> int:
        self.came = len(self.blocks.span)
        try:
            for layer, tensors in enumerate(self.blocks.layers):
                most = self.copier.most_blocks(tensors)
                for first in range(0, self.came, most):
                    self._read(layer, first, most)
            while self.reads:
                self._deliver()
        finally:
            wait([read.statuses for read in self.reads])
            for read in self.reads:
                read.staging.release()
        return self.came

    def _read(self, layer: int, first: int, most: int) -> None:
        """Begin to read a piece; where there is no room, after one that was begun before."""
        while len((some := self.blocks.part(first, min(first + most, self.came))).indices):
            staging = self._room(layer, some)
            if staging is not None:
                wanted = layer, some.hashes, some.span, staging.memory.segments, staging.indices
                statuses = self.readers.submit(self.link.get_into, *wanted)
                self.reads.append(_Read(first, len(some.span), staging, statuses))
                return
            self._deliver()

    def _room(self, layer: int, some: Blocks) -> Staging | None:
        """None where a piece that is read holds it up. Raises NoRoom where others do."""
        if len(self.reads) == READS:
            return None
        patience = 0.0 if self.reads else self.deadline_s
        try:
            return self.copier.stage(some.layers[layer], some.indices, patience)
        except NoRoom:
            if not self.reads:
                raise
            return None

    def _deliver(self) -> None:
        """The oldest piece: wait for it, and copy what came into the tensors."""
        read = self.reads[0]
        came = leading([status is BlockStatus.OK for status in read.statuses.result()])
        read.staging.deliver(came, self.deadline_s)
        self.reads.popleft().staging.release()
        if came < read.blocks:
            self.came = min(self.came, read.first + came)


class LayerwisePut:
    """One put whose layers come one after the other. Its methods are for one thread.

    From `layer(i)` until `finish` or the end of the context, the blocks in the tensors of layer i
    must not change. A context that an exception leaves puts nothing more.
    """

    def __init__(self, client: TensorClient, blocks: Blocks) -> None:
        self.blocks = blocks
        self.dropped = False
        self._client = client
        self._there: dict[int, list[bool]] = {}  # by layer: of each block, whether the store has it
        self._open = 0
        self._failure: Exception | None = None
        self._changed = threading.Condition()

    def layer(self, layer: int) -> None:
        """The tensors of this layer hold the blocks: begin to copy them. Each layer once.

        Waits only where host memory is full. A layer that finds no room, or whose copy fails, is
        not put, nor are those after it: the blocks then do not count as stored.
        """
        if self.dropped or not self.blocks.span:
            return
        self._there[layer] = [False] * len(self.blocks.span)
        try:
            self._client._begin(self, layer)
        except (CopyFailed, NoRoom) as error:
            self._drop(error)

    def finish(self) -> int:
        """Wait for the store; how many leading blocks it has now with all layers.

        Raises CopyFailed where the device failed, and what else went wrong in the put's thread;
        DeadlineExceeded where the store does not come to an end: the tensors may still be read.
        """
        self._wait()
        if self._failure is not None and not isinstance(self._failure, NoRoom):
            raise self._failure
        if len(self._there) < len(self.blocks.layers):
            return 0
        return min(map(leading, self._there.values()), default=0)

    def begun(self) -> None:
        """A job more is on its way to the client's thread."""
        with self._changed:
            self._open += 1

    def ended(
        self, layer: int, first: int, there: Sequence[bool], failure: Exception | None
    ) -> None:
        """The client's thread is done with a job."""
        with self._changed:
            self._there[layer][first : first + len(there)] = there
            self._open -= 1
            self._changed.notify()
        if failure is not None:
            self._drop(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.dropped = True
        self._wait()

    def _drop(self, failure: Exception) -> None:
        self.dropped = True
        self._failure = self._failure or failure

    def _wait(self) -> None:
        """Until no job of this put is left; what waits is dropped after the deadline."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._open, self._client.deadline_s):
                return
            self.dropped = True
            if not self._changed.wait_for(lambda: not self._open, self._client.deadline_s):
                raise DeadlineExceeded("a put of tensors did not come to an end")


def leading(flags: Sequence[bool]) -> int:
    """How many of the first ones are true."""
    return next((at for at, flag in enumerate(flags) if not flag), len(flags))
