"""The split of sessions between versions of a model."""

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.serving.request.versions import version_of

SESSIONS = [f"session {number}".encode() for number in range(2000)]


def moved(before: dict[str, float], after: dict[str, float]) -> list[tuple[str, str]]:
    pairs = [(version_of(each, before), version_of(each, after)) for each in SESSIONS]
    return [(was, now) for was, now in pairs if was != now]


def within(count: int, share: float) -> bool:
    """Whether so many of SESSIONS are within four standard deviations of their share."""
    mean, deviation = len(SESSIONS) * share, sqrt(len(SESSIONS) * share * (1 - share))
    return abs(count - mean) < 4 * deviation


@pytest.mark.parametrize(
    "weights", [{"a": 90, "b": 10}, {"a": 1, "b": 1, "c": 1}, {"a": 0.5, "b": 2, "c": 97.5}]
)
def test_each_version_gets_its_share(weights: dict[str, float]) -> None:
    chosen = [version_of(each, weights) for each in SESSIONS]
    for model, weight in weights.items():
        assert within(chosen.count(model), weight / sum(weights.values()))


WEIGHTS = st.floats(min_value=0.01, max_value=100)


@given(st.dictionaries(st.text(max_size=8), WEIGHTS, min_size=1), WEIGHTS, st.binary(), st.data())
def test_a_higher_weight_moves_sessions_to_that_version_alone(
    weights: dict[str, float], more: float, session: bytes, data: st.DataObject
) -> None:
    raised = data.draw(st.sampled_from(sorted(weights)))
    now = version_of(session, {**weights, raised: weights[raised] + more})
    assert now in (raised, version_of(session, weights))


def test_new_weights_move_only_the_sessions_whose_share_changed() -> None:
    found = moved({"a": 90, "b": 10}, {"a": 80, "b": 20})
    assert set(found) == {("a", "b")}
    assert within(len(found), 0.1)


def test_weights_count_relative_to_each_other() -> None:
    assert moved({"a": 90, "b": 10}, {"b": 1, "a": 9}) == []


def test_the_sessions_of_a_version_that_is_away_are_shared_by_the_others() -> None:
    found = moved({"a": 50, "b": 30, "c": 20}, {"b": 30, "c": 20})
    assert {was for was, _ in found} == {"a"}
    to_b = sum(now == "b" for _, now in found)
    assert abs(to_b - 0.6 * len(found)) < 4 * sqrt(len(found) * 0.24)
