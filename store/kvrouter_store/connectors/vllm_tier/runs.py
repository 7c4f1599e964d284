"""The chunks of one of vLLM's transfer jobs, as the store names them. Moves no bytes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from kvrouter_store.connectors.vllm_tier.identity import GROUP, KEY_BYTES, NAME
from kvrouter_store.identity.chain import HASH_BYTES

Chunk = tuple[bytes, Any, OffloadKey, int]  # group, place in the request, key, slot


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


def runs_of(
    job: Any, node_of: Callable[[OffloadKey], str] | None = None, *, remember: bool = False
) -> list[Run]:
    """The chunks of a TransferJob in prefix order; with `remember`, later jobs build on them.

    Chunks whose place in the request is not known are runs of their own. Those that have no name in
    the store are left out.
    """
    context = job.req_context
    chunks = [
        (GROUP(key), context.get_offload_key_position(key), key, slot)
        for key, slot in zip(job.keys, map(int, job.chunk_ids), strict=True)
        if len(key) == KEY_BYTES  # vLLM's weak hashes are shorter, and no names for the store
    ]
    if any(place is None for _, place, _, _ in chunks):
        return [
            _run([chunk], "" if node_of is None else node_of(chunk[2]), b"") for chunk in chunks
        ]
    stored = context.get_state(_Stored) or _Stored()
    runs = []
    for group, node, members in _together(sorted(chunks), node_of):
        parent = stored.last.get(group, b"") if remember else b""
        runs.append(_run(members, node, parent))
        if remember:
            stored.last[group] = NAME(runs[-1].keys[-1])
    if remember:
        context.set_state(stored)
    return runs


def _together(
    chunks: list[Chunk], node_of: Callable[[OffloadKey], str] | None
) -> Iterator[tuple[bytes, str, list[Chunk]]]:
    """Those of each group that follow each other and are on the same node."""
    for group, members in groupby(chunks, itemgetter(0)):
        if node_of is None:
            yield group, "", list(members)
            continue
        for node, some in groupby(members, lambda chunk: node_of(chunk[2])):
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


def _run(chunks: list[Chunk], node: str, parent: bytes) -> Run:
    keys = [key for _, _, key, _ in chunks]
    hashes = list(map(NAME, keys))
    if parent in hashes:  # stored again from there on
        parent = b""
    first = len(parent) // HASH_BYTES
    return Run(
        get_offload_group_idx(keys[0]),
        node,
        keys,
        parent + b"".join(hashes),
        range(first, first + len(keys)),
        [slot for _, _, _, slot in chunks],
    )
