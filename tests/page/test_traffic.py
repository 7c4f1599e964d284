"""Requests by model."""

from tests.page.test_board import Stream, context, decoded
from tests.page.test_window import Clock
from tests.unit.router.conftest import joined

from kvrouter.control.page.board import MOST, OTHER, Board, ModelTraffic
from kvrouter.control.page.model import ModelCard
from kvrouter.engines.engine import Role
from kvrouter.engines.pool import EnginePool
from kvrouter.serving.request.context import RequestContext


def asked(model: str, first_s: float | None = None) -> RequestContext:
    made = context(started_s=0.0)
    made.model = model
    return made if first_s is None else decoded(made, None, "d:1", first_s)


def cards(board: Board, *models: str) -> dict[str, ModelCard]:
    pool = EnginePool()
    for port, model in enumerate(models, 1):
        joined(pool, f"e:{port}", Role.DECODE, models=(model,))
    board.update()
    board.count_live()
    board.models.note(1.0, pool.models())
    return {card.name: card for card in board.models.cards(pool.all())}


def test_each_model_has_its_requests_tokens_and_times() -> None:
    board = Board(Clock())
    board.models.note(0.0, ())
    streaming, waiting, failed = asked("a", 0.4), asked("a"), asked("b")
    streaming.stream = Stream()
    streaming.stream.events = 7
    for one in (streaming, waiting, failed):
        board.enter(one)
    failed.outcome.reason = "error"
    board.leave(failed)
    assert cards(board, "a", "a", "c") == {
        "a": ModelCard("a", 2, 2, 1, 0, 0, 7, 0.4),
        "b": ModelCard("b", 0, 0, 0, 0, 1, 0, None),
        "c": ModelCard("c", 1, 0, 0, 0, 0, 0, None),
    }


def test_a_request_that_waits_counts_for_the_known_model_that_it_asks_for() -> None:
    board = Board(Clock())
    board.models.note(0.0, ("m",))
    board.enter(context())  # asks for "m", and is not resolved yet
    assert cards(board, "m")["m"].waiting == 1


def test_a_client_cannot_fill_the_table_with_names() -> None:
    board = Board(Clock())
    board.models.note(0.0, ())
    for _ in range(3):
        board.enter(context())  # no engine serves "m"
    assert {name: card.waiting for name, card in cards(board).items()} == {OTHER: 3}


def test_models_beyond_the_most_are_one_and_make_room_for_each_other_in_time() -> None:
    traffic = ModelTraffic()
    names = [f"m{number}" for number in range(MOST + 20)]
    traffic.note(0.0, names)
    for name in names:
        traffic.of(name).totals.ok += 1
    traffic.note(1.0, names)
    assert {card.name: card.ok for card in traffic.cards(())} == {
        **dict.fromkeys(names[:MOST], 1),
        OTHER: 20,
    }
    for now_s in (100.0, 200.0, 300.0):
        traffic.note(now_s, ("new",))
    traffic.of("new").totals.ok += 1
    traffic.note(301.0, ("new",))
    assert [(card.name, card.ok) for card in traffic.cards(())] == [("new", 1)]


def test_tokens_of_a_model_only_grow() -> None:
    board = Board(Clock())
    board.models.note(0.0, ())
    one = asked("a", 0.4)
    one.stream = Stream()
    one.stream.events = 12
    board.enter(one)
    assert cards(board)["a"].output_tokens == 12
    one.outcome.generated = 10  # as the engine counts
    board.leave(one)
    assert cards(board)["a"].output_tokens == 12
