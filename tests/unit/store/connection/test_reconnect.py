"""When a client tries a node again: pauses after failures, and one probe at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter_store.connection.reconnect import BackOff, Circuit


def test_a_back_off_doubles_up_to_its_limit_and_ends_with_a_success() -> None:
    backoff = BackOff(first_s=0.1, longest_s=0.5)
    pauses = []
    for now in (10.0, 20.0, 30.0, 40.0):
        backoff.failed(now)
        pauses.append(round(backoff.remaining_s(now), 6))
    assert pauses == [0.1, 0.2, 0.4, 0.5]
    assert backoff.remaining_s(40.25) == pytest.approx(0.25)
    assert backoff.remaining_s(41.0) == 0
    backoff.succeeded()
    backoff.failed(50.0)
    assert backoff.remaining_s(50.0) == pytest.approx(0.1)


def test_a_circuit_is_closed_until_an_operation_times_out() -> None:
    circuit = Circuit()
    assert not circuit.is_open
    circuit.timed_out(0.0)
    assert circuit.is_open


def test_an_open_circuit_lets_one_operation_at_a_time_probe() -> None:
    circuit = Circuit()
    circuit.timed_out(10.0)
    assert not circuit.may_probe(10.1)
    assert circuit.may_probe(10.3)
    assert not circuit.may_probe(10.3)
    circuit.probed(10.5, answered=False)
    assert not circuit.may_probe(10.6)
    assert circuit.may_probe(11.1)
    circuit.probed(11.1, answered=True)
    assert not circuit.is_open


def test_time_outs_of_operations_that_were_on_their_way_do_not_lengthen_the_pause() -> None:
    circuit = Circuit()
    for late in (10.0, 10.05, 10.1):
        circuit.timed_out(late)
    assert circuit.remaining_s(10.1) == pytest.approx(0.15)


@given(st.lists(st.sampled_from(["begun", "timed_out", "answered", "silent", "later"])))
def test_never_two_probes_at_once_and_always_another_one(steps: list[str]) -> None:
    circuit, now, probing = Circuit(), 0.0, False
    for step in steps:
        if step == "begun":
            probes = circuit.is_open and circuit.may_probe(now)
            assert not (probes and probing)
            probing = probing or probes
        elif step == "timed_out":
            circuit.timed_out(now)
        elif step == "later":
            now += 0.3
        elif probing:
            circuit.probed(now, answered=step == "answered")
            probing = False
    if circuit.is_open and not probing:
        assert circuit.may_probe(now + 1.0)
