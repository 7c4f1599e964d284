"""Whether engines live, by a clock that the tests turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.conftest import Clock, joined

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.life import GAPS, LifeLimits, Lives, Look, Progress, Pulse
from kvrouter.engines.pool import EnginePool

LIMITS = LifeLimits(stall_s=10.0, silence_s=10.0, failed_checks=2)


@pytest.fixture
def pulse(clock: Clock) -> Pulse:
    return Pulse(clock, LIMITS)


@pytest.fixture
def progress(clock: Clock) -> Progress:
    return Progress(clock, LIMITS, counts=True)


def gone(pulse: Pulse) -> bool:
    return pulse.is_gone(prefills_alone=False)


def test_a_server_that_answers_no_check_and_shows_nothing_is_gone(
    clock: Clock, pulse: Pulse
) -> None:
    pulse.missed = 2
    clock.pass_s(9.9)
    assert not gone(pulse)
    clock.pass_s(0.1)
    assert gone(pulse)


def test_silence_without_a_check_that_was_missed_is_no_fault(clock: Clock, pulse: Pulse) -> None:
    clock.pass_s(30 * 60)
    assert not gone(pulse)
    pulse.missed = 1
    assert not gone(pulse)


def test_prefill_legs_alone_may_be_silent_for_twice_as_long(clock: Clock, pulse: Pulse) -> None:
    pulse.missed = 4
    clock.pass_s(19.9)
    assert gone(pulse)
    assert not pulse.is_gone(prefills_alone=True)
    clock.pass_s(0.1)
    assert pulse.is_gone(prefills_alone=True)


def test_bytes_are_life_however_many_checks_are_missed(clock: Clock, pulse: Pulse) -> None:
    for _ in range(100):
        pulse.missed += 1
        clock.pass_s(5)
        pulse.showed(clock() - 1)
        assert not gone(pulse)
    clock.pass_s(9)
    assert gone(pulse)


def test_an_answer_ends_the_count_of_missed_checks(clock: Clock, pulse: Pulse) -> None:
    pulse.missed = 5
    clock.pass_s(60)
    pulse.answered()
    clock.pass_s(60)
    pulse.missed += 1
    assert not gone(pulse)


def look(progress: Progress, tokens: float | None) -> None:
    assert progress.due() is Look.COUNTERS
    progress.counted(tokens)


def test_streams_that_get_nothing_while_counters_stand_still_have_stalled(
    clock: Clock, progress: Progress
) -> None:
    progress.saw(clock())
    clock.pass_s(4.9)
    assert progress.due() is None
    clock.pass_s(0.1)
    look(progress, 700)
    clock.pass_s(4.9)
    look(progress, 700)
    assert not progress.stalled
    clock.pass_s(0.1)
    assert progress.stalled


def test_looks_without_an_answer_show_no_progress(clock: Clock, progress: Progress) -> None:
    progress.saw(clock())
    for _ in range(2):
        clock.pass_s(5)
        assert progress.due() is Look.COUNTERS
        progress.unanswered()
    assert progress.stalled


def test_one_look_is_not_enough(clock: Clock, progress: Progress) -> None:
    progress.saw(clock())
    clock.pass_s(11)
    look(progress, 700)
    assert not progress.stalled


def test_text_that_a_parser_holds_back_for_a_minute_is_no_stall_while_counters_move(
    clock: Clock, progress: Progress
) -> None:
    progress.saw(clock())
    began_s, tokens = clock(), 0.0
    for _ in range(240):
        clock.pass_s(0.25)
        tokens += 5
        progress.saw(began_s)
        if progress.due():
            look(progress, tokens)
        assert not progress.stalled


def test_half_an_hour_of_thinking_is_no_stall(clock: Clock, progress: Progress) -> None:
    for _ in range(30 * 60 * 4):
        clock.pass_s(0.25)
        progress.saw(clock() - 0.03, 0.03)
        assert progress.due() is None
        assert not progress.stalled


def test_what_counters_did_before_the_streams_stopped_is_no_progress(
    clock: Clock, progress: Progress
) -> None:
    progress.saw(clock())
    clock.pass_s(6)
    look(progress, 100)
    progress.saw(clock())  # an event: 900 tokens more until the core hangs
    for _ in range(2):
        clock.pass_s(5)
        look(progress, 1000)
    assert progress.stalled


def test_legs_that_have_not_begun_owe_nothing(clock: Clock, progress: Progress) -> None:
    progress.saw(None)
    clock.pass_s(120)
    assert progress.due() is None
    assert not progress.stalled
    progress.saw(clock())
    assert not progress.stalled


def test_a_stream_that_ends_leaves_no_older_debt(clock: Clock, progress: Progress) -> None:
    held_back_s = clock()
    clock.pass_s(60)
    progress.saw(clock())
    clock.pass_s(1)
    progress.saw(held_back_s)  # the stream that got something is over
    assert progress.quiet_s == 1


@pytest.mark.parametrize(("gap_s", "limit_s"), [(0.03, 10.0), (0.5, 10.0), (12.0, GAPS * 12.0)])
def test_a_slow_engine_may_take_twenty_of_its_own_gaps(
    clock: Clock, progress: Progress, gap_s: float, limit_s: float
) -> None:
    progress.saw(clock())
    for at in range(10):
        clock.pass_s(gap_s)
        assert not at or progress.quiet_s < progress.limit_s
        progress.saw(clock(), gap_s)
    assert progress.limit_s == pytest.approx(limit_s)


def test_one_long_pause_makes_no_engine_slow_for_long(clock: Clock, progress: Progress) -> None:
    progress.saw(clock(), 60.0)
    assert progress.limit_s == GAPS
    for _ in range(8):
        progress.saw(clock(), 0.03)
    assert progress.limit_s == 10.0
    progress.saw(clock(), 60.0)
    assert progress.limit_s == 10.0


def test_an_engine_without_counters_is_tried_after_a_minute(
    clock: Clock, progress: Progress
) -> None:
    progress.counted(None)
    progress.saw(clock())
    clock.pass_s(59)
    assert progress.due() is None
    clock.pass_s(1)
    assert progress.due() is Look.TRIAL
    assert not progress.stalled
    progress.worked()
    assert progress.quiet_s == 0
    clock.pass_s(60)
    progress.unanswered()
    assert progress.stalled


def test_an_engine_of_which_nothing_is_known_is_asked_at_once_and_not_judged(clock: Clock) -> None:
    progress = Progress(clock, LIMITS)
    assert progress.due() is None
    progress.saw(clock())
    assert progress.due() is Look.COUNTERS
    for _ in range(3):
        clock.pass_s(10)
        progress.unanswered()
    assert not progress.stalled


STEPS = st.tuples(st.sampled_from(["event", "moves", "still", "unanswered"]), st.floats(0, 4))


@given(st.lists(STEPS))
def test_an_engine_has_stalled_only_after_its_limit_without_an_event(
    steps: list[tuple[str, float]],
) -> None:
    clock = Clock()
    progress = Progress(clock, LIMITS, counts=True)
    event_s, tokens = clock(), 0.0
    for what, seconds in steps:
        clock.pass_s(seconds)
        tokens += what == "moves"
        event_s = clock() if what == "event" else event_s
        progress.saw(event_s)
        asked = progress.due() is Look.COUNTERS
        if asked and what == "unanswered":
            progress.unanswered()
        elif asked:
            progress.counted(tokens)
        assert not progress.stalled or clock() - event_s >= LIMITS.stall_s


def engine() -> Engine:
    return joined(EnginePool(), "127.0.0.1:1", Role.BOTH)


def test_an_engine_that_joins_again_is_not_judged_by_its_past(clock: Clock) -> None:
    lives, target = Lives(clock, LIMITS), engine()
    lives.progress(target).counted(5)
    assert lives.progress(target).counts
    lives.restarted(target)
    assert lives.progress(target).counts is None
    lives.pulse(target).missed = 3
    lives.forget(target)
    assert not lives.pulse(target).missed
