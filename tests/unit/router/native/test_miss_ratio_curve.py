"""The curve is what stores of each size would find: LRU, the end of a chain first."""

import math
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter._native import MissRatioCurve

MOST, DAY_S, SIZE = 16_384, 86_400.0, 1 << 20
ALL = 4096
"""Tokens of a block that stands for itself alone: all are sampled."""
Prompt = tuple[int, ...]


def block(path: object) -> bytes:
    return sha256(repr(path).encode()).digest()


def chain_of(prompt: Prompt) -> list[bytes]:
    return [block(path) for path in accumulate(((item,) for item in prompt), lambda a, b: a + b)]


def replay(chains: Iterable[Sequence[bytes]], capacity: int) -> int:
    """Blocks that a store with room for `capacity` finds."""
    store: OrderedDict[bytes, None] = OrderedDict()
    found = 0
    for chain in chains:
        found += next((n for n, each in enumerate(chain) if each not in store), len(chain))
        for each in reversed(chain):
            store[each] = None
            store.move_to_end(each)
        while len(store) > capacity:
            store.popitem(last=False)
    return found


def curve_of(chains: Iterable[Sequence[bytes]], tokens: int, most: int = MOST) -> MissRatioCurve:
    curve = MissRatioCurve(most, DAY_S)
    for chain in chains:
        curve.see(b"".join(chain), 1, tokens, SIZE, len(chain) * tokens, 0.0)
    return curve


def end_of_class(blocks: int) -> float:
    """The largest size that counts as so many blocks do."""
    return float(2 ** ((math.floor(8 * math.log2(blocks * SIZE)) + 1) / 8))


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1)


@given(prompts)
def test_with_all_blocks_in_the_sample_it_is_exact(asked: list[Prompt]) -> None:
    chains = [chain_of(prompt) for prompt in asked]
    curve, total = curve_of(chains, ALL), sum(map(len, chains))
    for capacity in range(1, 12):  # below, each has a class of its own
        share = replay(chains, capacity) / total
        assert curve.found(end_of_class(capacity)) == pytest.approx(share, abs=1e-6)


@given(prompts, st.lists(st.floats(1, 1e9), min_size=2, max_size=5))
def test_a_larger_store_finds_no_less(asked: list[Prompt], sizes: list[float]) -> None:
    curve = curve_of(map(chain_of, asked), ALL)
    shares = [curve.found(size) for size in sorted(sizes)]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [256, 1024])
def test_a_sample_is_within_two_points_of_a_whole_replay(tokens: int) -> None:
    """Conversations that grow and pause; a few thousand sampled blocks stand for 39,000.

    The error is the sample's: of either sign, and the larger the steeper the curve is.
    """
    chance, talks = random.Random(3), [Prompt([n % 40]) for n in range(3000)]
    chains: list[list[bytes]] = []
    for _ in range(6000):
        at = min(int(chance.expovariate(1 / 900)), 2999)
        talks[at] += tuple(chance.randrange(1 << 30) for _ in range(chance.randint(1, 12)))
        chains.append([block((at if n else talks[at][0], n, talks[at][n])) for n in
                       range(len(talks[at]))])  # fmt: skip
    curve, total = curve_of(chains, tokens), sum(map(len, chains))
    for capacity in (500, 1500, 4000, 9000, 16_000):
        share = replay(chains, capacity) / total
        assert curve.found(capacity * SIZE) == pytest.approx(share, abs=0.02), capacity


def test_other_models_have_other_blocks() -> None:
    curve, hashes = MissRatioCurve(MOST, DAY_S), block(1)
    for model in (1, 2):
        curve.see(hashes, model, ALL, SIZE, ALL, 0.0)
    assert curve.found(1 << 60) == 0
    curve.see(hashes, 2, ALL, SIZE, 2 * ALL, 0.0)
    assert curve.found(1 << 60) == pytest.approx(1 / 4)
    assert curve.bytes == 2 * SIZE


def test_the_tail_of_a_prompt_is_never_found() -> None:
    curve = MissRatioCurve(MOST, DAY_S)
    for _ in range(4):
        curve.see(block(1), 1, ALL, SIZE, 2 * ALL, 0.0)
    assert curve.found(1 << 60) == pytest.approx(3 / 8)


def test_without_a_prompt_there_is_no_share() -> None:
    assert math.isnan(MissRatioCurve(MOST, DAY_S).found(1 << 30))


def test_a_block_is_forgotten_after_a_day() -> None:
    curve = MissRatioCurve(MOST, DAY_S)
    for now_s in (0.0, DAY_S, 2.5 * DAY_S):
        curve.see(block(1), 1, ALL, SIZE, ALL, now_s)
    weights = (1, 2, 2**2.5)
    assert curve.found(1 << 60) == pytest.approx(weights[1] / sum(weights))


def test_after_years_it_still_tells_a_share() -> None:
    curve = MissRatioCurve(MOST, DAY_S)
    for day in range(5000):
        curve.see(block(1), 1, ALL, SIZE, ALL, day * DAY_S)
    assert curve.found(1 << 60) > 0.99


@pytest.mark.parametrize("wrong", [(b"x" * 33, 16, SIZE), (b"", 0, SIZE), (b"", 16, 0)])
def test_what_is_no_chain_is_refused(wrong: tuple[bytes, int, int]) -> None:
    hashes, tokens, size = wrong
    with pytest.raises(ValueError, match=r"whole number|not empty"):
        MissRatioCurve(MOST, DAY_S).see(hashes, 1, tokens, size, 1, 0.0)


def grown(act: Callable[[], object]) -> int:
    """Bytes of memory that it leaves behind."""

    def held() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = held()
    act()
    return held() - before


@pytest.mark.slow
def test_ten_million_blocks_take_no_more_memory_than_the_sample() -> None:
    curve, piece = MissRatioCurve(MOST, DAY_S), 10_000

    def see_all() -> None:
        for n in range(1000):
            curve.see(os.urandom(32 * piece), 1, 16, SIZE, 16 * piece, float(n))

    assert grown(see_all) < 8 << 20
    assert curve.bytes == pytest.approx(1e7 * SIZE, rel=0.05)
    assert curve.found(1 << 60) == pytest.approx(0, abs=0.05)
