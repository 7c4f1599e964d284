"""The decoders of KV events against every kind of cache group of each vLLM, by its own classes."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.run_inside import run_inside
from tests.vllm.test_walks import next_vllm

from kvrouter.prefix.events.mapping import WHOLE_KINDS, BlockNaming
from kvrouter.prefix.events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    decode_tokens,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.tested("vllm", "KV events of each kind of cache group", "code"),
    pytest.mark.tested("next vllm", "KV events of each kind of cache group", "code"),
]
__all__ = ["next_vllm"]

PART_KINDS = {
    "sliding_window",
    "sliding_window_mla",
    "mamba",
    "chunked_local_attention",
    "encoder_only_attention",
    "cross_attention",
    "unknown",  # layers of several kinds, or a kind of a plugin
}
"""Kinds of cache groups that drop blocks which a prefix still needs, or cannot be told."""


def check(python: Path, *paths: Path) -> None:
    done = run_inside(python, paths, "event_kinds.py")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == (WHOLE_KINDS | PART_KINDS) - {None}
    for kind, told in found.items():
        assert told["whole"] == (kind in WHOLE_KINDS), kind
        assert not (told["whole"] and told["part"]), f"{kind} no longer says which it is"
        for encoding in ("maps", "arrays"):
            check_message(bytes.fromhex(told[encoding]), kind)


def check_message(payload: bytes, kind: str) -> None:
    batch = decode_batch(payload)
    stored, removed, cleared = batch.pieces()
    assert isinstance(stored, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert isinstance(cleared, AllBlocksCleared)
    assert stored.block_hashes == [b"\1" * 32, b"\2" * 32]
    assert list(decode_tokens(stored)) == list(range(32))
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (0, kind)
    assert (removed.block_hashes, removed.group_idx) == ([b"\2" * 32], 0)
    assert (stored.manifest, removed.manifest) == (None, None)
    assert BlockNaming().counts_for(stored) == (kind in WHOLE_KINDS)


def test_every_kind_of_cache_group_of_this_vllm_is_known(vllm_python: Path) -> None:
    check(vllm_python)


def test_every_kind_of_cache_group_of_the_next_vllm_is_known(
    vllm_python: Path,
    next_vllm: Path,
) -> None:
    check(vllm_python, next_vllm)
