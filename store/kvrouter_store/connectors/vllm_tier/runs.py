"""The chunks of one of vLLM's transfer jobs, as the store names them. Moves no bytes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx

from kvrouter_store.identity.chain import HASH_BYTES


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

    last: dict[int, bytes] = field(default_factory=dict)


def runs_of(
    job: Any, node_of: Callable[[OffloadKey], str] = lambda key: "", *, remember: bool = False
) -> list[Run]:
    """The chunks of a TransferJob in prefix order; with `remember`, later jobs build on them.

    Chunks whose place in the request is not known are runs of their own. Those that have no name in
    the store are left out.
    """
    context = job.req_context
    places = {key: context.get_offload_key_position(key) for key in job.keys}
    slots = dict(zip(job.keys, map(int, job.chunk_ids), strict=True))
    # vLLM's weak hashes are shorter, and no names for the store.
    named = [key for key in job.keys if len(get_offload_block_hash(key)) == HASH_BYTES]
    if None in places.values():
        return [_run([key], node_of(key), slots, b"") for key in named]
    stored = context.get_state(_Stored) or _Stored()
    runs = []
    ordered = sorted(named, key=lambda key: (get_offload_group_idx(key), places[key]))
    for (group, node), members in groupby(
        ordered, lambda key: (get_offload_group_idx(key), node_of(key))
    ):
        parent = stored.last.get(group, b"") if remember else b""
        runs.append(_run(list(members), node, slots, parent))
        if remember:
            stored.last[group] = get_offload_block_hash(runs[-1].keys[-1])
    if remember:
        context.set_state(stored)
    return runs


def cut(run: Run, most: int) -> Iterator[Run]:
    """The run in pieces of at most so many chunks, each with the chain up to its end."""
    for first in range(0, len(run.keys), most):
        piece = slice(first, first + most)
        span = run.span[piece]
        chain = run.chain[: span.stop * HASH_BYTES]
        yield replace(
            run, keys=run.keys[piece], chain=chain, span=span, chunk_ids=run.chunk_ids[piece]
        )


def _run(keys: list[OffloadKey], node: str, slots: dict[OffloadKey, int], parent: bytes) -> Run:
    hashes = [get_offload_block_hash(key) for key in keys]
    if parent in hashes:  # stored again from there on
        parent = b""
    first = len(parent) // HASH_BYTES
    return Run(
        get_offload_group_idx(keys[0]),
        node,
        keys,
        parent + b"".join(hashes),
        range(first, first + len(keys)),
        [slots[key] for key in keys],
    )
