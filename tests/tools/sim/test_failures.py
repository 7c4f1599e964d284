"""Failures on purpose: how many, and of which kinds."""

from random import Random

import pytest
from pydantic import ValidationError

from kvrouter.tools.sim.failures import FAILURES, FailureInjection
from kvrouter.tools.sim.settings import SimSettings


def test_without_a_rate_nothing_fails() -> None:
    injection = FailureInjection(0, (), Random(1))
    assert [injection.draw() for _ in range(100)] == [None] * 100


def test_a_rate_of_100_fails_everything_with_every_kind() -> None:
    injection = FailureInjection(100, (), Random(1))
    drawn = [injection.draw() for _ in range(200)]
    messages = {failure.message for failure in drawn if failure}
    assert messages == {failure().message for failure in FAILURES.values()}
    assert None not in drawn


def test_only_the_named_kinds_are_injected_at_about_the_rate() -> None:
    injection = FailureInjection(30, ("rate_limit",), Random(1))
    drawn = [injection.draw() for _ in range(1000)]
    failed = [failure for failure in drawn if failure is not None]
    assert {failure.status for failure in failed} == {429}
    assert 240 < len(failed) < 360


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="'meteor' is no failure: give rate_limit"):
        SimSettings(model="m", failure_types=["meteor"])
