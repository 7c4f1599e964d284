"""Block hashes are vLLM's own: its code hashes the same chains in its environment."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvrouter_store.identity.chain import hash_tokens, root_hash

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

INSIDE = Path(__file__).parent / "inside"
CHAINS = 1000


def random_case(draw: random.Random) -> dict[str, Any]:
    """A chain of up to 9 blocks, of any token ids, with every kind of extra key."""
    block_tokens = draw.choice([1, 7, 16, 32, 64, 128])
    length = draw.randrange(0, 9 * block_tokens + 1)
    ceiling = draw.choice([24, 300, 70_000, 2**32])
    name = draw.choice(["adapter", "Ünïcode-名前", "a" * 300])
    return {
        "block_tokens": block_tokens,
        "tokens": [draw.randrange(ceiling) for _ in range(length)],
        "seed": draw.choice([None, None, "0", "42", "sëed"]),
        "lora": draw.choice([None, None, [name, f"/adapters/{name}"]]),
        "cache_salt": draw.choice([None, None, "tenant", "密" * 40]),
    }


def hashed_by_kvstore(case: dict[str, Any]) -> list[str]:
    lora = case["lora"]
    hashes = hash_tokens(
        case["tokens"],
        case["block_tokens"],
        root=root_hash(case["seed"]),
        lora=(lora[0], lora[1]) if lora else None,
        cache_salt=case["cache_salt"],
    )
    return [block_hash.hex() for block_hash in hashes]


def test_a_thousand_random_chains_are_named_as_vllm_names_them(vllm_python: Path) -> None:
    draw = random.Random(20261121)
    cases = [random_case(draw) for _ in range(CHAINS)]
    done = subprocess.run(
        [vllm_python, INSIDE / "chains.py"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout[done.stdout.index("[") :])
    different = [
        case for case, chain in zip(cases, theirs, strict=True) if hashed_by_kvstore(case) != chain
    ]
    assert sum(len(chain) for chain in theirs) > CHAINS
    assert not different
