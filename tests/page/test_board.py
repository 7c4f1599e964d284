"""What the board tells of requests: from contexts as the router has them."""

from typing import Any, cast

import pytest
from tests.page.test_window import Clock

from kvrouter.control.page.board import SHOWN_REQUESTS, Board, phase
from kvrouter.control.page.model import FlowCard
from kvrouter.engines.families.base import Handoff
from kvrouter.openai.request import parse
from kvrouter.serving.request.context import RequestContext, Timing


class Exchange:
    """What a client gets."""

    status = 200


def context(name: str = "r", *, stream: bool = True, started_s: float = 0.0) -> RequestContext:
    made = RequestContext(cast("Any", Exchange()), name, b"", Timing(started_s))
    body = b'{"model": "m", "prompt": [1, 2, 3, 4], "stream": %s}' % (
        b"true" if stream else b"false"
    )
    made.request = parse(body, "completion", 8)
    return made


def decoded(
    made: RequestContext, prefill: str | None, decode: str, first_s: float
) -> RequestContext:
    made.route.prefill_engine, made.route.decode_engine = prefill, decode
    made.route.handoff = Handoff() if prefill else None
    made.timing.planned_s, made.timing.first_s = made.timing.started_s + 0.1, first_s
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> Board:
    return Board(clock)


def test_a_request_is_listed_from_its_arrival_to_its_end(board: Board) -> None:
    one, other = context("one"), context("other")
    board.enter(one)
    board.enter(other)
    assert [card.id for card in board.requests().shown] == ["one", "other"]
    board.leave(one)
    assert [card.id for card in board.requests().shown] == ["other"]
    board.leave(other)
    assert board.requests().total == 0


def test_two_requests_of_one_id_are_two_rows(board: Board) -> None:
    same = [context("same"), context("same")]
    for one in same:
        board.enter(one)
    assert len({card.key for card in board.requests().shown}) == 2


def test_only_the_oldest_are_listed_and_all_are_counted(board: Board) -> None:
    for number in range(SHOWN_REQUESTS + 20):
        board.enter(context(str(number)))
    requests = board.requests()
    assert requests.total == SHOWN_REQUESTS + 20
    assert [card.id for card in requests.shown] == [str(n) for n in range(SHOWN_REQUESTS)]


def test_phases_follow_each_other_on_the_way_of_a_request() -> None:
    made = context()
    made.queued = True
    phases = [phase(made)]
    made.queued = False
    phases.append(phase(made))
    made.route.prefill_engine = "p:1"
    phases.append(phase(made))
    made.route.handoff = Handoff()
    phases.append(phase(made))
    made.route.decode_engine = "d:1"
    phases.append(phase(made))
    made.timing.first_s = 1.0
    phases.append(phase(made))
    assert phases == ["queue", "plan", "prefill", "landing", "decode", "stream"]


def test_a_flow_is_counted_at_its_end(board: Board) -> None:
    two = [decoded(context(), "p:1", "d:1", 0.9) for _ in range(2)]
    for one in two:
        board.enter(one)
    assert board.flows() == []
    for one in two:
        board.leave(one)
    assert board.flows() == [FlowCard("p:1", "d:1", 2, 8)]


def test_flows_are_those_of_the_last_minute(board: Board, clock: Clock) -> None:
    for second in (0.0, 50.0, 100.0):
        clock.now_s = second
        one = context(started_s=second)
        board.enter(one)
        board.leave(decoded(one, None, f"d:{second:.0f}", second + 0.1))
    assert {flow.decode for flow in board.flows()} == {"d:50", "d:100"}


def test_ranks_flow_as_their_server(board: Board) -> None:
    one = context()
    board.enter(one)
    board.leave(decoded(one, "p:1@3", "d:1@0", 0.2))
    assert board.flows() == [FlowCard("p:1", "d:1", 1, 4)]


def test_a_prompt_whose_prefill_leg_failed_came_from_nowhere(board: Board) -> None:
    one = context()
    board.enter(one)
    decoded(one, "p:1", "d:1", 0.2).route.handoff = None
    board.leave(one)
    assert board.flows() == [FlowCard(None, "d:1", 1, 4)]


def test_a_request_that_was_never_answered_is_no_flow(board: Board) -> None:
    one = context()
    board.enter(one)
    board.leave(one)
    assert board.flows() == []


def test_prompts_of_one_request_flow_each_to_its_engine(board: Board) -> None:
    whole = context()
    board.enter(whole)
    whole.shares = [decoded(context(), "p:1", "d:1", 0.2), decoded(context(), None, "d:2", 0.3)]
    board.leave(whole)
    assert sorted(flow.decode for flow in board.flows()) == ["d:1", "d:2"]


class Stream:
    """What an answer streams through."""

    events = 0
    last_s = 0.0
    between_events = True


def test_tokens_that_clients_got_only_grow_and_are_counted_once(board: Board) -> None:
    one, stream = context(), Stream()
    board.enter(one)
    decoded(one, None, "d:1", 0.5).stream = stream
    counts = []
    for events in (3, 9):
        stream.events = events
        counts.append(board.output_tokens())
    one.outcome.generated = 8  # as the engine counts
    board.leave(one)
    assert [*counts, board.output_tokens()] == [3, 9, 9]


def test_tokens_of_a_client_that_left_count_too(board: Board) -> None:
    one, stream = context(), Stream()
    board.enter(one)
    decoded(one, None, "d:1", 0.5).stream = stream
    stream.events = 5
    board.leave(one)
    assert board.output_tokens() == 5


def test_answers_that_come_whole_count_their_tokens_at_their_end(board: Board) -> None:
    one = context(stream=False)
    board.enter(one)
    decoded(one, None, "d:1", 0.5).outcome.generated = 17
    board.leave(one)
    assert board.output_tokens() == 17
