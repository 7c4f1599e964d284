"""Hashes out of memory are the hashes that hashing gives."""

import tracemalloc
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.engines.engine import HashDomain
from kvrouter.prefix.hash_cache import LEAST_BLOCKS, HashCache
from kvrouter_store.identity.chain import hash_tokens, root_hash

DOMAIN = HashDomain(2, root_hash(None))
LONG = list(range(2 * LEAST_BLOCKS + 2 * 20))


def packed(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


own = st.lists(st.integers(0, 3), max_size=40)
prompts = st.lists(st.tuples(st.integers(0, 60), own), max_size=12)


@settings(max_examples=200)
@given(
    asked=prompts,
    adapter=st.sampled_from([None, ("a", "/a")]),
    salt=st.sampled_from([None, "s"]),
    size=st.sampled_from([200, 4000, 8000, 1 << 20]),
)
def test_whatever_was_asked_before_a_chain_is_what_hashing_gives(
    asked: list[tuple[int, list[int]]],
    adapter: tuple[str, str] | None,
    salt: str | None,
    size: int,
) -> None:
    """Prompts that share beginnings of any length, in a memory of any size."""
    chains = HashCache(size)
    for shared, own_tokens in asked:
        tokens = LONG[:shared] + own_tokens
        direct = hash_tokens(tokens, 2, root=DOMAIN.root, lora=adapter, cache_salt=salt).data
        assert chains.hashes(packed(tokens), DOMAIN, adapter, salt) == direct
        assert chains.use.bytes <= chains.use.max_bytes == size


def test_what_is_remembered_takes_no_more_memory_than_its_bound_whatever_the_salts() -> None:
    tracemalloc.start()
    try:
        chains = HashCache(1 << 20)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(500):
            salt = f"{number}" + "\N{SNOWMAN}" * (number % 100) * 100
            chains.hashes(packed([number, *LONG]), DOMAIN, salt=salt)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * (1 << 20) < taken < 1.1 * (1 << 20)


def test_the_next_turn_of_a_session_hashes_its_new_blocks_only() -> None:
    chains = HashCache()
    chains.hashes(packed(LONG), DOMAIN)
    assert chains.reused_blocks == 0
    chains.hashes(packed([*LONG, 7, 7, 7]), DOMAIN)
    assert chains.reused_blocks == len(LONG) // 2
    chains.hashes(packed([*LONG[:-2], 8, 8, 8]), DOMAIN)
    assert chains.reused_blocks == len(LONG) - 1


def test_chains_of_other_salts_adapters_and_domains_are_not_mixed() -> None:
    chains = HashCache()
    ids = packed(LONG)
    other = HashDomain(2, root_hash("0"))
    every = [
        chains.hashes(ids, DOMAIN),
        chains.hashes(ids, DOMAIN, None, "s"),
        chains.hashes(ids, DOMAIN, ("a", "/a"), None),
        chains.hashes(ids, other),
        chains.hashes(ids, HashDomain(4, DOMAIN.root)),
    ]
    assert len(set(every)) == 5
    assert chains.reused_blocks == 0
