"""What the router learns of host memory from the messages of vLLM's own offloading."""

import json
from itertools import count
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from tests.unit.router.prefix.events.test_tracker import BLOCK, Wire, make_wire
from tests.vllm.run_inside import run_inside
from tests.vllm.test_walks import next_vllm

from kvrouter.engines.engine import Identity
from kvrouter.prefix.events.mapping import Naming
from kvrouter.prefix.events.messages import BlockRemoved, decode_batch
from kvrouter_store.identity.chain import hash_tokens

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.tested("vllm", "KV events of host memory", "code"),
    pytest.mark.tested("next vllm", "KV events of host memory", "code"),
]
__all__ = ["next_vllm"]

BLOCKS = 4
TOKENS = list(range(BLOCKS * BLOCK))


def heard(root: bytes, *messages: str) -> Wire:
    """A router that has heard these messages."""
    wire = make_wire()
    wire.pool.join(wire.engine, Identity(("m",), None, BLOCK, None, root))
    for number, each in zip(count(), messages, strict=False):
        wire.tracker.receive([wire.topic, pack(">Q", number), bytes.fromhex(each)])
    return wire


def loadable(told: dict[str, Any], key: str, messages: int, root: bytes) -> int:
    """Blocks of the prompt that the router expects in host memory after so many messages."""
    wire = heard(root, told["own"], *told[key][:messages])
    known = bytes.fromhex(told["root"]) == root
    assert wire.tracker.naming(wire.engine) is (Naming.EXACT if known else Naming.MAPPED)
    hashes = hash_tokens(TOKENS, BLOCK, root=root).data
    assert wire.matched(hashes) == 0
    return wire.loadable(hashes).blocks


def check(python: Path, *paths: Path) -> None:
    done = run_inside(python, paths, "offload_events.py")
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    for root in (bytes.fromhex(told["root"]), bytes(32)):
        for key in ("1 False", "1 True", "2 True"):
            (gone,) = decode_batch(bytes.fromhex(told[key][1])).pieces()
            assert isinstance(gone, BlockRemoved)
            assert len(gone.block_hashes) == int(key[0])
            assert loadable(told, key, 1, root) == BLOCKS
            assert loadable(told, key, 2, root) < BLOCKS
        assert loadable(told, "2 False", 1, root) == 0  # a chunk's last block alone has a name


def test_host_memory_is_known_from_what_this_vllm_publishes(vllm_python: Path) -> None:
    check(vllm_python)


def test_host_memory_is_known_from_what_the_next_vllm_publishes(
    vllm_python: Path, next_vllm: Path
) -> None:
    check(vllm_python, next_vllm)
