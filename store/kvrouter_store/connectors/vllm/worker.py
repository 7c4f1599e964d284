"""The worker's side of the vLLM connector: copies blocks between KV cache and store. Plans nothing.

Saves happen inside the step that completes a block, so its content cannot change under the copy; a
step that broke off completed none. Loads run on one thread between steps: vLLM gives the blocks of
a loading request to no other request until the load is reported, finished or aborted. On a CPU the
worker runs one step after the other, so an earlier step cannot still write a block that is loaded.
"""

import logging
import queue
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvrouter_store._core import BlockStatus, Segments
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.vllm.plan import LoadOrder, StepPlan
from kvrouter_store.connectors.vllm.settings import ConnectorRefused
from kvrouter_store.identity.block import Manifest

IDLE_WAIT_S = 0.005  # a step without tokens waits for a load instead of spinning


def cache_segments(kv_caches: Mapping[str, Any], num_blocks: int) -> Segments:
    """Where the blocks are: one run of bytes per layer (or several layers, where they adjoin).

    `kv_caches` are vLLM's tensors by layer, block index outermost; the caller keeps them alive.
    Raises ConnectorRefused where a block is not one run of host memory in each layer.
    """
    runs: list[tuple[int, int, int]] = []
    for name in sorted(kv_caches, key=_layer_order):
        base, stride, size = _run(name, kv_caches[name], num_blocks)
        if runs and runs[-1][1] == stride and runs[-1][0] + runs[-1][2] == base:
            runs[-1] = (runs[-1][0], stride, runs[-1][2] + size)
        else:
            runs.append((base, stride, size))
    return _segments(runs)


def head_segments(
    kv_caches: Mapping[str, Any], num_blocks: int, parts: int
) -> tuple[Segments, ...]:
    """Where each of `parts` equal ranges of the blocks' KV heads is: one run of bytes per layer.

    Raises ConnectorRefused where the heads are not the next axis behind the blocks', or cannot be
    divided so.
    """
    runs = [_run(name, kv_caches[name], num_blocks) for name in sorted(kv_caches, key=_layer_order)]
    for name, cache in kv_caches.items():
        if cache.shape[0] != num_blocks or len(cache.shape) < 3 or cache.shape[1] % parts:
            raise ConnectorRefused(
                f"the KV heads of {name} cannot be divided into {parts} (shape "
                f'{tuple(cache.shape)}); leave "parts" out'
            )
    return tuple(
        _segments(
            [(base + part * size // parts, stride, size // parts) for base, stride, size in runs]
        )
        for part in range(parts)
    )


def _segments(runs: Sequence[tuple[int, int, int]]) -> Segments:
    """Segments of runs of bytes: address of block 0, from block to block, bytes of a block."""
    bases, strides, sizes = zip(*runs, strict=True)
    return Segments(bases, strides, sizes)


def _layer_order(name: str) -> tuple[tuple[int, str], ...]:
    """Layers in the model's order on every engine: numbers in names compare as numbers."""
    pieces = re.split(r"(\d+)", name)
    return tuple((int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces)


def _run(name: str, cache: Any, num_blocks: int) -> tuple[int, int, int]:
    """(address of block 0, bytes from block to block, bytes of a block) of one layer's tensor.

    vLLM's attention kernels may cut a block into several of theirs; those must then adjoin.
    """
    if cache.device.type != "cpu":
        raise ConnectorRefused(
            f"the KV cache of {name} is on {cache.device.type}, and this connector copies "
            "from host memory; start a CPU build of vLLM"
        )
    per_block, odd = divmod(cache.shape[0], num_blocks)
    dense = cache[0].is_contiguous() and (per_block == 1 or cache.stride(0) == cache[0].numel())
    if odd or not dense:
        raise ConnectorRefused(
            f"a block of {name} is not one run of memory (shape {tuple(cache.shape)}, strides "
            f"{cache.stride()}); leave VLLM_KV_CACHE_LAYOUT unset"
        )
    element = cache.element_size() * per_block
    return cache.data_ptr(), cache.stride(0) * element, cache[0].numel() * element


class WorkerSide:
    """Saves and loads for one rank. Made once per worker process; shutdown() ends its thread.

    open_link: makes the link once the first plan has brought the manifest.
    """

    def __init__(
        self, rank: int, open_link: Callable[[Manifest], StoreLink], log: logging.Logger
    ) -> None:
        self._rank = rank
        self._open_link = open_link
        self._log = log
        self._segments: Segments | None = None
        self._caches: Mapping[str, Any] = {}
        self._num_blocks = 0
        self._link: StoreLink | None = None
        self._parts: list[tuple[int, Segments]] = []  # number in the manifest, and where it is
        self._owns = True
        self._orders: queue.SimpleQueue[LoadOrder | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = threading.Condition()
        self._loading = 0
        self._finished: set[str] = set()
        self._pieces: dict[str, list[int]] = {}
        self._failed: set[int] = set()
        self._failed_now: set[int] = set()
        self._idle = False
        self._mismatch = False

    def register(self, kv_caches: Mapping[str, Any], num_blocks: int) -> None:
        """Take the engine's KV cache. Raises ConnectorRefused where its layout cannot be copied."""
        self._segments = cache_segments(kv_caches, num_blocks)
        self._caches = kv_caches  # keeps the memory alive that the segments point to
        self._num_blocks = num_blocks

    def start_loads(self, plan: StepPlan) -> None:
        """Hand this step's loads to the thread. The first step of all opens the link."""
        self._idle = plan.idle
        if self._segments is not None:
            self._attach(plan)
        if not plan.loads:
            return
        with self._ended:
            self._loading += len(plan.loads)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstore-loads", daemon=True)
            self._thread.start()
        for order in plan.loads:
            self._orders.put(order)

    def save(self, plan: StepPlan) -> None:
        """Copy the blocks that this step completed. Returns when the copies are done.

        Copies nothing where the step broke off: vLLM calls this in a `finally`
        (v1/worker/kv_connector_model_runner_mixin.py), so also when a signal or an error ended the
        forward pass; then the later layers of the planned blocks hold older bytes.
        """
        if not plan.saves:
            return
        if (cause := sys.exception()) is not None:
            self._log.warning("the forward pass broke off (%r): its KV is not shared", cause)
            return
        link = self._attach(plan)
        if link is None or not self._owns:
            return
        for order in plan.saves:
            for part, segments in self._parts:
                result = link.put(part, order.hashes, order.span, segments, order.block_ids)
                if result is None:
                    break
                if result.refused:
                    self._log.debug("%s: %s", order.request_id, result.statuses)

    def finished_loads(self) -> set[str]:
        """Requests whose load ended, well or not; their failed blocks are reported right after."""
        with self._ended:
            if self._idle and self._loading and not self._finished:
                self._ended.wait(IDLE_WAIT_S)
            finished, self._finished = self._finished, set()
            self._failed_now |= self._failed
            self._failed = set()
        return finished

    def failed_blocks(self) -> set[int]:
        """Block ids whose bytes must not be used, of the loads that `finished_loads` gave."""
        failed, self._failed_now = self._failed_now, set()
        return failed

    def shutdown(self, deadline_s: float = 5.0) -> None:
        """End the thread and the link; a running load ends first, within its deadline."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(deadline_s)
        if self._link is not None:
            self._link.close()

    def _attach(self, plan: StepPlan) -> StoreLink | None:
        """The link for the scheduler's manifest; None where that does not fit this cache."""
        if self._link is None and not self._mismatch:
            manifest = Manifest.from_doc(plan.manifest_doc)
            self._owns = self._rank % plan.replicas == 0
            reason = self._take_parts(manifest, self._rank // plan.replicas, plan.rank_parts)
            if reason:
                self._mismatch = True
                self._log.error("KV is not shared: %s", reason)
            else:
                self._link = self._open_link(manifest)
        return self._link

    def _take_parts(self, manifest: Manifest, rank: int, each: int) -> str:
        """Find the parts of the manifest in the cache; why they are not there, or ''."""
        own = range(rank * each, (rank + 1) * each)
        named = [part.block_bytes for part in manifest.parts[own.start : own.stop]]
        held = self._segments.block_bytes if self._segments is not None else 0
        if self._segments is None or sum(named) != held or len(named) != each:
            return f"a block has {held} bytes, the manifest says {sum(named)}"
        try:
            shares = (
                (self._segments,)
                if each == 1
                else head_segments(self._caches, self._num_blocks, each)
            )
        except ConnectorRefused as error:
            return str(error)
        self._parts = list(zip(own, shares, strict=True))
        return ""

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            failed: Sequence[int] = order.block_ids
            try:
                if not self._pieces.get(order.request_id):  # else a block before these is bad
                    failed = self._load_one(order)
            except Exception:
                self._log.exception("loading for %s failed; it is recomputed", order.request_id)
            finally:
                self._end(order, failed)

    def _end(self, order: LoadOrder, failed: Sequence[int]) -> None:
        """Note how an order ended; a request is reported with its last one."""
        bad = self._pieces.setdefault(order.request_id, [])
        bad += [*failed, *order.lost]
        with self._ended:
            self._loading -= 1
            if order.last:
                self._finished.add(order.request_id)
                self._failed.update(self._pieces.pop(order.request_id))
            self._ended.notify_all()

    def _load_one(self, order: LoadOrder) -> Sequence[int]:
        """Load; the block ids from the first bad one on (a chain is of no use behind a gap)."""
        if self._link is None:
            return order.block_ids
        whole, wrong = len(order.block_ids), ""
        for part, segments in self._parts:
            span, ids = order.span[:whole], order.block_ids[:whole]
            statuses = self._link.get_into(part, order.hashes, span, segments, ids)
            for index, status in enumerate(statuses):
                if status is not BlockStatus.OK:
                    whole, wrong = index, status.name.lower()
                    break
        if wrong:
            self._log.warning(
                "%s: block %d of %d is %s; it is recomputed from there",
                order.request_id,
                order.first + whole,
                order.span.stop,
                wrong,
            )
        return order.block_ids[whole:]
