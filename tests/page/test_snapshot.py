"""The document, with the clock in the test's hand."""

from typing import Any

import pytest
from tests.page.test_board import context
from tests.page.test_window import Clock

from kvrouter.control.page.board import Board
from kvrouter.control.page.events import Events
from kvrouter.control.page.model import Load
from kvrouter.control.page.snapshot import Snapshots
from kvrouter.control.page.tiers import StoreWatches
from kvrouter.engines.engine import Identity, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.telemetry.metrics import Metrics


class Router:
    """What a router has, without a router."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.metrics = Metrics()
        self.pool = EnginePool(self.clock)
        self.board = Board(self.clock)
        self.running = 0
        self.sizes: dict[int, float] = {}
        self.snapshots = Snapshots(
            pool=self.pool,
            metrics=self.metrics,
            board=self.board,
            events=Events(lambda engine: None, lambda: 1e9 + self.clock.now_s),
            condition=lambda: ("ok", []),
            index_state=lambda engine: "guessed",
            problem=lambda engine: None,
            load=lambda: Load(self.running, 10, 0, 0, 5),
            stores=StoreWatches(lambda: ()),
            store_sizes=lambda: self.sizes,
            policy="prefix",
            clock=self.clock,
            wall=lambda: 1e9 + self.clock.now_s,
        )

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.now_s += 1
            self.snapshots.tick()


@pytest.fixture
def router() -> Router:
    return Router()


def test_the_fates_of_the_last_minute_tell_what_was_reused_first(router: Router) -> None:
    router.metrics.of("m").fates.update(first_use=50, evicted_store=40)
    router.metrics.of("n").fates.update(first_use=1, store=9)
    router.pass_time(1)
    found = [(card["fate"], card["tokens"], card["kind"]) for card in told(router)]
    assert found == [
        ("store", 9, "reused"),
        ("first_use", 51, "needed"),
        ("evicted_store", 40, "lost"),
    ]
    router.pass_time(61)
    assert told(router) == []


def told(router: Router) -> list[dict[str, Any]]:
    return router.snapshots.snapshot().fates


def test_tokens_are_told_apart_by_their_source(router: Router) -> None:
    router.metrics.of("m").prompt_tokens += 100
    router.metrics.of("m").hit_engine += 30
    router.metrics.of("m").hit_store += 50
    router.pass_time(1)
    minute = router.snapshots.snapshot().minute
    assert (minute.prompt_tokens, minute.engine_tokens, minute.store_tokens) == (100, 30, 50)


def test_a_document_serves_all_who_ask_in_the_same_moment(router: Router) -> None:
    first = router.snapshots.document()
    router.running = 7
    assert router.snapshots.document() is first
    router.clock.now_s += 1
    assert b'"running":7' in router.snapshots.document()


def test_the_document_stays_small(router: Router) -> None:
    for number in range(1000):
        router.board.enter(context(f"request-{number}"))
    assert len(router.snapshots.document()) < 16 * 1024


def test_an_engine_is_shown_with_its_ranks(router: Router) -> None:
    engine = router.pool.add("h:1", Role.DECODE)
    router.pool.join(engine, Identity(("m",), ranks=(0, 1), version="0.32.0"))
    for _ in range(3):
        router.pool.failed(engine.ranks[1], _timeout())
    (card,) = router.snapshots.snapshot().engines
    assert [(rank["id"], rank["circuit"]) for rank in card["ranks"]] == [
        ("h:1@0", "closed"),
        ("h:1@1", "open"),
    ]
    assert (card["version"], card["down"]) == ("0.32.0", False)


def _timeout() -> Any:
    from kvrouter.http.failure import Failure

    return Failure.TIMEOUT


def test_an_engine_that_works_half_of_the_time_is_half_busy(router: Router) -> None:
    engine = router.pool.add("h:1", Role.PREFILL)
    router.pool.join(engine, Identity(("m",)))
    for step in range(600):
        ticket = router.pool.reserve(engine, 1)
        router.clock.now_s += 0.05
        if step % 10 == 0:
            router.snapshots.tick()
        ticket.release()
        router.clock.now_s += 0.05
    (card,) = router.snapshots.snapshot().engines
    assert card["busy"] == pytest.approx(0.5, abs=0.01)


def test_an_engine_that_rests_for_a_minute_is_not_busy(router: Router) -> None:
    engine = router.pool.add("h:1", Role.PREFILL)
    assert router.snapshots.snapshot().engines[0]["busy"] is None
    router.pool.join(engine, Identity(("m",)))
    with_leg = router.pool.reserve(engine, 1)
    router.pass_time(30)
    assert router.snapshots.snapshot().engines[0]["busy"] == 1
    with_leg.release()
    router.pass_time(61)
    assert router.snapshots.snapshot().engines[0]["busy"] == 0


def test_failures_of_the_last_minute_are_counted(router: Router) -> None:
    router.metrics.errors["429", "m"] += 2
    router.pass_time(61)
    router.metrics.errors["429", "m"] += 1
    router.metrics.errors["499", "m"] += 4
    router.pass_time(1)
    assert router.snapshots.snapshot().minute.failed == 5


def test_the_longest_wait_for_a_turn_is_told(router: Router) -> None:
    router.clock.now_s = 5.0
    for started_s in (0.0, 2.0, 3.0):
        one = context(started_s=started_s)
        one.queued = started_s > 0
        router.board.enter(one)
    assert router.snapshots.snapshot().requests.waiting_s == 3.0


def test_the_time_to_the_first_token_is_the_mean_of_the_last_minute(router: Router) -> None:
    router.metrics.of("m").ttft.observe(9.0)
    router.pass_time(61)
    assert router.snapshots.snapshot().minute.ttft_mean_s is None
    router.metrics.of("m").ttft.observe(0.25)
    router.metrics.of("n").ttft.observe(0.75)
    router.pass_time(1)
    assert router.snapshots.snapshot().minute.ttft_mean_s == pytest.approx(0.5)


def test_an_engine_is_shown_with_its_label(router: Router) -> None:
    router.pool.add("rack1-a=h:1", Role.DECODE)
    router.pool.add("h:2", Role.DECODE)
    cards = router.snapshots.snapshot().engines
    assert [(card["id"], card["label"]) for card in cards] == [("h:1", "rack1-a"), ("h:2", None)]


def test_an_engine_that_is_away_still_belongs_to_its_model(router: Router) -> None:
    engine = router.pool.add("h:1", Role.DECODE)
    router.pool.join(engine, Identity(("m",)))
    router.pool.leave(engine)
    (card,) = router.snapshots.snapshot().engines
    assert (card["status"], card["models"]) == ("away", ("m",))
