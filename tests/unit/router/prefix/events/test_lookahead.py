"""Block names that cover tokens after the block, as vLLM's draft layers have them since 0.33."""

from typing import Any

import pytest
from tests.unit.router.prefix.events.test_tracker import (
    BLOCK,
    TOKENS,
    Wire,
    make_wire,
    removed,
    stored,
)

from kvrouter.prefix.events.confidence import IndexState, Reason

OTHER = [*TOKENS[: 2 * BLOCK], *([7] * BLOCK)]
"""Two blocks as before, and another one behind them."""


def next_tokens(*tokens: int) -> list[list[int]]:
    return [[token] for token in tokens]


def both(wire: Wire) -> None:
    """The engine has both prompts: of their second block once for each token behind it."""
    ahead = next_tokens(TOKENS[BLOCK], TOKENS[2 * BLOCK], TOKENS[3 * BLOCK])
    wire.send(stored([1, 2, 3], TOKENS[: 3 * BLOCK], lookahead_token_ids=ahead, session_id="s"))
    ahead = next_tokens(7, 8)
    wire.send(stored([12, 13], OTHER[BLOCK:], parent=1, lookahead_token_ids=ahead))


def test_a_block_under_two_names_is_held_until_the_last_of_them_is_removed() -> None:
    wire = make_wire()
    both(wire)
    wire.send(removed([13, 12]))
    assert wire.matched() == 3
    wire.send(removed([3, 2]))
    assert wire.matched() == 1


def test_a_name_that_is_told_twice_is_one_name() -> None:
    wire = make_wire()
    both(wire)
    both(wire)
    wire.send(removed([13, 12, 3, 2]))
    assert wire.matched() == 1


def test_names_of_draft_layers_are_bounded_as_others_are() -> None:
    wire = make_wire(max_names=2)
    both(wire)
    assert wire.matched() == 0  # the oldest went first
    wire.tracker.tick()
    assert wire.tracker.confidence(wire.engine) is Reason.LOOKAHEAD


def test_the_last_block_of_such_an_engine_is_never_certain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wire = make_wire()
    both(wire)
    wire.tracker.tick()
    reason = wire.tracker.confidence(wire.engine)
    assert (reason, reason.state) == (Reason.LOOKAHEAD, IndexState.DEGRADED)
    assert not wire.tracker.trusts(wire.engine)
    assert "disable_lookahead_block_hashes" in caplog.text


@pytest.mark.parametrize("told", [{}, {"lookahead_token_ids": None}, {"session_id": "s"}])
def test_an_engine_that_does_not_look_ahead_is_certain(told: dict[str, Any]) -> None:
    wire = make_wire()
    wire.send(stored([1, 2, 3, 4], TOKENS, **told))
    wire.tracker.tick()
    assert wire.tracker.confidence(wire.engine) is Reason.COMPLETE
