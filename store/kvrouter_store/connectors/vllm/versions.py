"""What differs between vLLM versions, in one table. Imports no vLLM.

The connector refuses to start with a version that is not listed, unless it is told to try a newer
one.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class VllmFacts:
    """One series of versions. Functions are named as "module:attribute".

    `hash_algo`: the value of --prefix-caching-hash-algo whose chain the store computes too.
    `hash_function`: the function behind that value. `root_seed`: gives the seed of an engine's
    chains for that function. `cpu_isa`: names the instruction set, which orders a block's bytes.
    `ran`: what of it ran in the tests; vLLM's schedulers run over cache groups made by hand
    (tests/vllm/test_walks.py).
    """

    series: str
    hash_algo: str
    hash_function: str
    root_seed: str
    cpu_isa: str
    ran: Literal["engines", "schedulers", "nothing"] = "engines"


_V0_32 = VllmFacts(
    series="0.32",
    hash_algo="sha256_cbor",
    hash_function="vllm.utils.hashing:sha256_cbor",
    root_seed="vllm.v1.core.kv_cache_utils:resolve_none_hash_seed",
    cpu_isa="vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
)
VERSIONS: tuple[VllmFacts, ...] = (_V0_32, replace(_V0_32, series="0.33", ran="schedulers"))


def facts_of(version: str) -> VllmFacts | None:
    """The row for a version string such as '0.32.0+cpu'; for a newer series a guess.

    None for an older one, and for what is no version.
    """
    series = ".".join(version.partition("+")[0].split(".")[:2])
    known = next((facts for facts in VERSIONS if facts.series == series), None)
    if known is None and _order(series) > _order(VERSIONS[-1].series):
        return replace(VERSIONS[-1], series=series, ran="nothing")
    return known


def _order(series: str) -> tuple[int, ...]:
    """What series are compared by; () for what is none."""
    pieces = series.split(".")
    return tuple(map(int, pieces)) if all(piece.isdecimal() for piece in pieces) else ()
