"""The list of what happened."""

from tests.page.test_window import Clock

from kvrouter.control.page.events import KEPT, Events
from kvrouter.engines.engine import Engine, Role

ENGINE = Engine("a:1", Role.DECODE, label="rack1-a")


def events(problem: str | None = None) -> Events:
    return Events(lambda engine: problem, Clock())


def test_the_newest_event_comes_first_and_their_number_is_bounded() -> None:
    told = events()
    for number in range(KEPT + 5):
        told.reloaded([f"--flag-{number}"])
    cards = told.cards()
    assert [card.text for card in cards[:2]] == [f"--flag-{KEPT + 4}", f"--flag-{KEPT + 3}"]
    assert len(cards) == len({card.key for card in cards}) == KEPT


def test_an_engine_is_told_of_by_address_and_label_and_one_that_left_with_the_reason() -> None:
    told = events("/health: refused")
    told.engine_changed("joined", ENGINE)
    told.engine_changed("left", ENGINE)
    left, joined = told.cards()
    assert (left.kind, left.engine, left.label, left.text) == (
        *("left", "a:1", "rack1-a"),
        "/health: refused",
    )
    assert (joined.kind, joined.text) == ("joined", None)


def test_a_breaker_that_opens_again_and_again_is_told_of_once_until_it_closes() -> None:
    told = events()
    for change in ("breaker open", "breaker open", "breaker closed", "breaker open"):
        told.engine_changed(change, ENGINE)
    kinds = [card.kind for card in told.cards()]
    assert kinds == ["breaker open", "breaker closed", "breaker open"]


def test_a_rank_that_comes_back_has_a_breaker_that_may_open_again() -> None:
    told, server = events(), Engine("b:1", Role.DECODE)
    server.set_ranks((0, 1))
    told.engine_changed("breaker open", server.ranks[1])
    told.engine_changed("left", server)
    told.engine_changed("breaker open", server.ranks[1])
    assert [card.engine for card in told.cards()] == ["b:1@1", "b:1", "b:1@1"]


def test_settings_that_were_refused_do_not_show_what_was_in_them() -> None:
    told = events()
    told.reloaded([])
    told.reload_refused()
    refused, same = told.cards()
    assert (refused.kind, same.kind, same.text) == ("reload refused", "reload", "no flag changed")
