"""The drill's judge finds failures, hangs, wrong tokens and leaks."""

from dataclasses import replace

import pytest
from tests.chaos.judge import Asked, End, Fault, Leak, Schedule, judge

ROLES = {"p0": "prefill", "d0": "decode", "d1": "decode"}
WHOLE = Asked(
    "r", stream=True, begun_s=1, expected="abc", first_s=2, ended_s=5, end=End.WHOLE, text="abc"
)
BROKEN = replace(WHOLE, end=End.ERROR_EVENT, text="ab", resumable=False)


def after(*faults: Fault) -> Schedule:
    schedule = Schedule(ROLES)
    schedule.faults += faults
    return schedule


KILLED = Fault("decode killed", 3, 6, breaks_streams=True, down={"d0": "decode"})


def test_a_run_in_which_all_went_well_is_well() -> None:
    assert judge(after(KILLED), [WHOLE], [Leak("sockets", 4, 4)]).well


def test_a_stream_that_ran_when_its_engine_may_have_died_is_excused() -> None:
    verdict = judge(after(KILLED), [BROKEN], [])
    assert (verdict.well, verdict.failed, verdict.excused) == (True, 1, 1)


@pytest.mark.parametrize(
    "one",
    [
        replace(BROKEN, ended_s=2.9),  # before the fault
        replace(BROKEN, begun_s=6.1, first_s=7, ended_s=8),  # after it
        replace(BROKEN, first_s=None, text=""),  # nothing of it had come: another engine could
        replace(BROKEN, resumable=True),
        replace(BROKEN, end=End.CUT),  # without an error event
        replace(BROKEN, end=End.REFUSED, first_s=None, text=""),
        replace(BROKEN, end=End.HUNG),
        replace(BROKEN, text="aX"),
        replace(WHOLE, text="abX"),
        replace(WHOLE, text="ab"),
        replace(WHOLE, ended_s=40),
    ],
)
def test_what_has_no_excuse_is_a_problem(one: Asked) -> None:
    verdict = judge(after(KILLED), [one], [])
    assert not verdict.well
    assert one.name in verdict.problems[0]


def test_a_dead_prefill_engine_excuses_no_stream() -> None:
    fault = Fault("prefill stalled", 3, 6)
    assert not judge(after(fault), [BROKEN], []).well


def test_a_request_may_fail_while_no_engine_of_a_role_is_there() -> None:
    both = Fault("other killed", 4, 7, breaks_streams=True, down={"d1": "decode"})
    refused = replace(BROKEN, end=End.REFUSED, first_s=None, text="")
    assert judge(after(KILLED, both), [refused], []).well
    apart = replace(both, at_s=6.1)
    assert not judge(after(KILLED, apart), [refused], []).well


def test_what_is_left_over_is_a_problem() -> None:
    (problem,) = judge(after(), [WHOLE], [Leak("leases", 0, 1), Leak("tasks", 9, 8)]).problems
    assert problem == "leases: 0 before, 1 after"


def test_a_drill_without_requests_is_not_well() -> None:
    assert not judge(after(), [], []).well
