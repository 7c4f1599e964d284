"""Prompts computed one step after the other, and answers that wait for the step."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.tools.sim.engine import Steps

SECONDS = st.floats(0.001, 10)


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=20))
def test_chunks_follow_each_other_and_none_begins_before_it_comes(
    chunks: list[tuple[float, float]],
) -> None:
    steps, now_s, free_s = Steps(), 0.0, 0.0
    for later_s, seconds in chunks:
        now_s += later_s
        done_s = steps.begin(now_s, seconds)
        free_s = max(free_s, now_s) + seconds
        assert abs(done_s - free_s) < 1e-6


def test_a_token_waits_for_the_chunk_that_is_computed_when_it_is_due_and_for_no_other() -> None:
    steps = Steps()
    assert steps.token_at(5.0) == 5.0
    assert steps.begin(1.0, 2.0) == 3.0
    assert steps.begin(1.5, 4.0) == 7.0
    assert [steps.token_at(due) for due in (0.5, 2.0, 3.5, 7.5)] == [0.5, 3.0, 7.0, 7.5]
