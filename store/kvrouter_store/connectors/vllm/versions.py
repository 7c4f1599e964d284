"""Which versions of vLLM were tested, and what the connector calls in them. Imports no vLLM.

The connector refuses to start with a version that is not listed, unless it is told to try a newer
one.
"""

from typing import Final, Literal

Ran = Literal["engines", "schedulers", "nothing"]

TESTED: Final[dict[str, Ran]] = {"0.32": "engines", "0.33": "schedulers"}
"""What ran of each series in the tests, the newest last; vLLM's schedulers run over cache groups
made by hand (tests/vllm/test_walks.py)."""
HASH_ALGO: Final = "sha256_cbor"
"""The value of --prefix-caching-hash-algo whose chain the store computes too."""
HASH_FUNCTION: Final = "vllm.utils.hashing:sha256_cbor"
"""The function behind that value. This one and the next are named as "module:attribute"."""
ROOT_SEED: Final = "vllm.v1.core.kv_cache_utils:resolve_none_hash_seed"
"""Gives the seed of an engine's chains for that function."""
CPU_ISA: Final = "vllm.v1.attention.backends.cpu_attn:_get_attn_isa"
"""Names the instruction set, which orders a block's bytes."""


def ran_of(version: str) -> Ran | None:
    """What ran of a version such as '0.32.0+cpu'; None of an older one, and of what is none."""
    series = ".".join(version.partition("+")[0].split(".")[:2])
    if series not in TESTED and _order(series) > _order([*TESTED][-1]):
        return "nothing"
    return TESTED.get(series)


def _order(series: str) -> tuple[int, ...]:
    """What series are compared by; () for what is none."""
    pieces = series.split(".")
    return tuple(map(int, pieces)) if all(piece.isdecimal() for piece in pieces) else ()
