"""Each token of a prompt has one fate, whatever is known of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.fates.fate import REUSED, Fate
from kvrouter.fates.split import Evidence, split

BLOCK = 16
lengths = st.integers(0, 400)
told = st.none() | lengths
fates = st.sampled_from(list(Fate))


@st.composite
def evidence(draw: st.DrawFn) -> Evidence:
    return Evidence(
        prompt=draw(st.integers(1, 300)),
        block=draw(st.sampled_from([0, 1, BLOCK, 64])),
        cached=draw(told),
        loaded=draw(told),
        held=draw(told),
        own=draw(lengths),
        sure=draw(st.booleans()),
        lower=draw(lengths),
        node=draw(lengths),
        store=draw(lengths),
        elsewhere=draw(lengths),
        coming=draw(lengths),
        seen=draw(lengths),
        akin=draw(lengths),
        identity=draw(fates),
        gone=draw(fates),
        barred=draw(st.none() | fates),
        late=draw(fates),
    )


@given(known=evidence())
def test_the_fates_of_a_prompt_add_up_to_its_tokens(known: Evidence) -> None:
    found = split(known)
    assert sum(found.values()) == known.prompt
    assert all(tokens > 0 for tokens in found.values())


@given(known=evidence())
def test_what_an_engine_says_that_it_reused_is_reused_and_no_more(known: Evidence) -> None:
    known.gone = known.identity = known.late = Fate.UNKNOWN
    known.barred = None
    found = split(known)
    reused = sum(found.get(fate, 0) for fate in REUSED)
    if known.cached is not None:
        most = known.cached if known.loaded is None else min(known.cached, known.loaded)
        assert reused == min(most, known.prompt)


@given(prompt=st.integers(1, 300), cached=lengths)
def test_nothing_is_unknown_where_the_engine_tells_what_it_reused(prompt: int, cached: int) -> None:
    known = Evidence(prompt=prompt, block=BLOCK, cached=cached)
    assert Fate.UNKNOWN not in split(known)


def test_every_fate_has_its_words() -> None:
    assert all(fate.words for fate in Fate)
    assert not any(fate.remedy for fate in REUSED)


PROMPT = 10 * BLOCK + 4
CASES: dict[str, tuple[dict[str, Any], dict[Fate, int]]] = {
    "nobody had it": ({}, {Fate.FIRST_USE: 160, Fate.TAIL: 4}),
    "the engine had some": (
        {"own": 64, "cached": 64, "seen": 64},
        {Fate.ENGINE: 64, Fate.FIRST_USE: 96, Fate.TAIL: 4},
    ),
    "the store had more": (
        {"own": 32, "node": 96, "store": 96, "cached": 96, "seen": 96},
        {Fate.ENGINE: 32, Fate.STORE: 64, Fate.FIRST_USE: 64, Fate.TAIL: 4},
    ),
    "the engine says that it had less than at the plan, and the store more": (
        {"own": 96, "held": 32, "node": 64, "store": 64, "cached": 128, "seen": 128},
        {Fate.ENGINE: 32, Fate.STORE: 96, Fate.FIRST_USE: 32, Fate.TAIL: 4},
    ),
    "another node had more": (
        {"node": 32, "store": 96, "cached": 96, "seen": 96},
        {Fate.STORE: 32, Fate.NEIGHBOUR: 64, Fate.FIRST_USE: 64, Fate.TAIL: 4},
    ),
    "its host memory had more": (
        {"own": 32, "lower": 96, "cached": 96, "seen": 96},
        {Fate.ENGINE: 32, Fate.LOWER: 64, Fate.FIRST_USE: 64, Fate.TAIL: 4},
    ),
    "a load failed": (
        {"store": 96, "cached": 32, "seen": 96},
        {Fate.NEIGHBOUR: 32, Fate.LOAD_FAILED: 64, Fate.FIRST_USE: 64, Fate.TAIL: 4},
    ),
    "its events were wrong": (
        {"own": 96, "cached": 32, "seen": 96},
        {Fate.ENGINE: 32, Fate.NOT_REPORTED: 64, Fate.FIRST_USE: 64, Fate.TAIL: 4},
    ),
    "a guess was wrong": (
        {"own": 96, "sure": False, "cached": 32, "seen": 96, "gone": Fate.EVICTED_ENGINE},
        {Fate.ENGINE: 32, Fate.EVICTED_ENGINE: 64, Fate.FIRST_USE: 64, Fate.TAIL: 4},
    ),
    "another engine had it, and more was evicted": (
        {"elsewhere": 48, "seen": 96, "gone": Fate.EVICTED_STORE},
        {Fate.BUSY_ELSEWHERE: 48, Fate.EVICTED_STORE: 48, Fate.FIRST_USE: 64, Fate.TAIL: 4},
    ),
    "it was being computed": (
        {"coming": 128, "seen": 96},
        {Fate.ON_ITS_WAY: 96, Fate.FIRST_USE: 64, Fate.TAIL: 4},
    ),
    "it had another salt": (
        {"seen": 32, "akin": 96, "gone": Fate.EVICTED_ENGINE, "identity": Fate.OTHER_SALT},
        {Fate.EVICTED_ENGINE: 32, Fate.OTHER_SALT: 64, Fate.FIRST_USE: 64, Fate.TAIL: 4},
    ),
    "engines differ": (
        {"elsewhere": 48, "seen": 96, "barred": Fate.OTHER_WEIGHTS},
        {Fate.OTHER_WEIGHTS: 96, Fate.FIRST_USE: 64, Fate.TAIL: 4},
    ),
    "decode computed what prefill had computed": (
        {"cached": 32, "own": 32, "seen": 32, "loaded": 96, "late": Fate.LANDED_LATE},
        {Fate.ENGINE: 32, Fate.FIRST_USE: 64, Fate.LANDED_LATE: 64, Fate.TAIL: 4},
    ),
    "decode computed all again": (
        {"cached": 96, "own": 96, "seen": 96, "loaded": 0, "late": Fate.STORE_AWAY},
        {Fate.STORE_AWAY: 160, Fate.TAIL: 4},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cause_is_told(case: str) -> None:
    known, told = CASES[case]
    assert split(Evidence(prompt=PROMPT, block=BLOCK, **known)) == told
