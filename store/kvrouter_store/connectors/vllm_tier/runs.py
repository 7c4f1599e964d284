"""The chunks of one of vLLM's transfer jobs, as the store names them. Moves no bytes."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from kvrouter_store.connectors.vllm_tier.identity import GROUP, KEY_BYTES, NAME
from kvrouter_store.identity.chain import HASH_BYTES

NodeOf = Callable[[OffloadKey], str]


class InOrder(list[OffloadKey]):
    """Keys of chunks of one request: by cache groups, and of each in prefix order."""


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks of one cache group, each built on the one before it.

    chain: the hashes of the blocks `span`, and of the one that the first builds on, where known.
    node: which node of the store has them; '' is the engine's own.
    """

    group: int
    node: str
    keys: list[OffloadKey]
    chain: bytes
    span: range
    chunk_ids: list[int]


@dataclass
class _Stored:
    """Kept by vLLM with a request: the hash of its last chunk that was stored, by cache group."""

    last: dict[bytes, bytes] = field(default_factory=dict)


def runs_of(job: Any, node_of: NodeOf | None = None, *, remember: bool = False) -> list[Run]:
    """The chunks of a TransferJob in prefix order; with `remember`, later jobs build on them.

    Chunks whose place in the request is not known are runs of their own. Those that have no name in
    the store are left out.
    """
    context = job.req_context
    keys, slots = _named(job)
    if not isinstance(job.keys, InOrder):
        places = list(map(context.get_offload_key_position, keys))
        if None in places:
            find = node_of or (lambda _: "")
            pairs = zip(keys, slots, strict=True)
            return [_run(find(key), [key], [slot], b"") for key, slot in pairs]
        chunks = sorted(zip(map(GROUP, keys), places, keys, slots, strict=True))
        keys, slots = [key for _, _, key, _ in chunks], [slot for _, _, _, slot in chunks]
    stored = context.get_state(_Stored) or _Stored()
    runs, first = [], 0
    for group, node, members in _together(keys, node_of):
        parent = stored.last.get(group, b"") if remember else b""
        runs.append(_run(node, members, slots[first : first + len(members)], parent))
        first += len(members)
        if remember:
            stored.last[group] = NAME(members[-1])
    if remember:
        context.set_state(stored)
    return runs


def _named(job: Any) -> tuple[list[OffloadKey], list[int]]:
    """Keys and slots of the chunks that the store can name. VLLM's weak hashes are shorter."""
    keys, slots = list(job.keys), list(map(int, job.chunk_ids))
    if set(map(len, keys)) == {KEY_BYTES}:
        return keys, slots
    named = [pair for pair in zip(keys, slots, strict=True) if len(pair[0]) == KEY_BYTES]
    return [key for key, _ in named], [slot for _, slot in named]


def _together(
    keys: Iterable[OffloadKey], node_of: NodeOf | None
) -> Iterator[tuple[bytes, str, list[OffloadKey]]]:
    """Those of each group that follow each other and are on the same node."""
    for group, members in groupby(keys, GROUP):
        if node_of is None:
            yield group, "", list(members)
            continue
        for node, some in groupby(members, node_of):
            yield group, node, list(some)


def cut(run: Run, most: int) -> Iterator[Run]:
    """The run in pieces of at most so many chunks, each with the chain up to its end."""
    for first in range(0, len(run.keys), most):
        piece = slice(first, first + most)
        span = run.span[piece]
        chain = run.chain[: span.stop * HASH_BYTES]
        yield replace(
            run, keys=run.keys[piece], chain=chain, span=span, chunk_ids=run.chunk_ids[piece]
        )


def _run(node: str, keys: list[OffloadKey], slots: list[int], parent: bytes) -> Run:
    hashes = list(map(NAME, keys))
    if parent in hashes:  # stored again from there on
        parent = b""
    first = len(parent) // HASH_BYTES
    span = range(first, first + len(keys))
    return Run(get_offload_group_idx(keys[0]), node, keys, parent + b"".join(hashes), span, slots)
