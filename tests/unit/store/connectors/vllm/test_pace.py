"""How long computing takes, by what was computed."""

from types import SimpleNamespace

import pytest

from kvrouter_store.connectors.vllm.pace import ASSUMED_S, LEAST_TOKENS, Pace


class Engine:
    """Computes prompts, and lets time pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = Pace(lambda: self.now)

    def compute(self, tokens: int, seconds: float) -> None:
        self.pace.begin("request", tokens)
        self.now += seconds
        self.pace.look(lambda _: SimpleNamespace(num_output_tokens=0))  # another step of it
        self.pace.look(lambda _: SimpleNamespace(num_output_tokens=1))


def test_before_anything_was_computed_a_pace_is_assumed() -> None:
    assert Engine().pace.seconds(1000) == pytest.approx(1000 * ASSUMED_S)


def test_the_first_prompt_which_may_compile_is_forgotten_for_the_second() -> None:
    engine = Engine()
    engine.compute(1000, 60.0)
    engine.compute(1000, 0.1)
    assert engine.pace.seconds(500) == pytest.approx(0.05)


def test_the_pace_is_that_of_most_of_the_last_prompts() -> None:
    engine = Engine()
    for seconds in (1.0, 1.0, 9.0, 1.0, 0.1, 1.0):
        engine.compute(1000, seconds)
    assert engine.pace.seconds(1000) == pytest.approx(1.0)
    for _ in range(9):
        engine.compute(1000, 2.0)
    assert engine.pace.seconds(1000) == pytest.approx(2.0)


def test_short_prompts_and_requests_that_ended_early_say_nothing() -> None:
    engine = Engine()
    engine.compute(LEAST_TOKENS - 1, 9.0)
    engine.pace.begin("left", 1000)
    engine.pace.look(lambda _: None)
    engine.pace.begin("aborted", 1000)
    engine.pace.end("aborted", computed=False)
    engine.now += 9
    engine.pace.end("left", computed=True)
    assert engine.pace.seconds(1) == pytest.approx(ASSUMED_S)
