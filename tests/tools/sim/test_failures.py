"""Failures on purpose: how many, and of which kinds."""

import json
from collections.abc import Callable

import pytest
from pydantic import ValidationError
from tests.tools.sim.conftest import LiveSim

from kvrouter.tools.sim.settings import FAILURES, SimSettings

Start = Callable[..., LiveSim]
BODY = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()


def statuses(sim: LiveSim, requests: int) -> list[int]:
    return [sim.ask("POST", "/v1/completions", BODY)[0] for _ in range(requests)]


def test_without_a_rate_nothing_fails(live_sim: Start) -> None:
    assert statuses(live_sim(), 20) == [200] * 20


def test_a_rate_of_100_fails_everything_with_every_kind(live_sim: Start) -> None:
    sim = live_sim(failure_injection_rate=100, seed=1)
    told = {sim.ask("POST", "/v1/completions", BODY)[1] for _ in range(80)}
    messages = {json.loads(body)["error"]["message"] for body in told}
    assert messages == {f"{message} (injected)." for _, message, _ in FAILURES.values()}


def test_only_the_named_kinds_are_injected_at_about_the_rate(live_sim: Start) -> None:
    sim = live_sim(failure_injection_rate=30, failure_types=["rate_limit"], seed=1)
    answers = statuses(sim, 200)
    assert set(answers) == {200, 429}
    assert 40 < answers.count(429) < 80


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="'meteor' is no failure: give rate_limit"):
        SimSettings(model="m", failure_types=["meteor"])
