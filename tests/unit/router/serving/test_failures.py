"""What the failures of one request come to, and the page that says it."""

from pathlib import Path
from typing import Any, cast

import pytest

from kvrouter.engines.engine import Engine, Role
from kvrouter.errors import ApiError
from kvrouter.http.failure import Failure
from kvrouter.serving.legs.failures import LegFailed, Refused, Words, answer_of, note
from kvrouter.serving.request.context import RequestContext, Timing
from kvrouter.tools.docs.failures import failures_page

ROOT = Path(__file__).parents[4]


def test_the_page_says_what_the_table_says() -> None:
    how = "python -m kvrouter.tools.docs.failures > docs/failures.md"
    assert (ROOT / "docs/failures.md").read_text() == failures_page(), how


def request() -> RequestContext:
    return RequestContext(cast("Any", None), "id", b"", Timing(0.0))


def failed(failure: Failure, words: Words | None = None, **more: Any) -> LegFailed:
    return LegFailed(Engine("e:1", Role.DECODE), failure, "why", words=words, **more)


def test_the_client_comes_again_when_the_first_of_full_engines_has_room() -> None:
    context = request()
    for seconds in (30, 17, 20):
        assert note(context, failed(Failure.FULL, Words(429, b"{}", retry_after_s=seconds)))
    answer = answer_of(context)
    assert isinstance(answer, Refused)
    assert (answer.words.status, answer.words.retry_after_s) == (429, 17)


def test_room_is_what_is_missing_if_one_engine_is_full_and_another_is_gone() -> None:
    context = request()
    note(context, failed(Failure.FULL, Words(429, None)))
    note(context, failed(Failure.REFUSED))
    answer = answer_of(context)
    assert isinstance(answer, ApiError)
    assert (answer.status, answer.retry_after_s) == (429, 1)


@pytest.mark.parametrize("leg", [Role.PREFILL, Role.DECODE])
def test_the_client_is_told_which_engine_is_gone(leg: Role) -> None:
    context = request()
    note(context, failed(Failure.REFUSED, leg=leg))
    answer = answer_of(context)
    assert isinstance(answer, ApiError)
    assert (answer.status, answer.message) == (503, f"No {leg} engine could answer.")


def test_a_second_500_is_the_requests_and_no_engine_is_counted() -> None:
    context, counted = request(), list[int]()
    words = Words(500, b'{"error": {}}')
    assert note(context, failed(Failure.ERROR, words, prove=lambda _: counted.append(1)))
    assert not note(context, failed(Failure.ERROR, words, prove=lambda _: counted.append(2)))
    answer = answer_of(context)
    assert isinstance(answer, Refused)
    assert answer.words is words
    assert counted == []


def test_a_500_is_the_engines_once_another_engine_does_well() -> None:
    context, counted = request(), list[int]()
    note(context, failed(Failure.ERROR, Words(500, None), prove=lambda _: counted.append(1)))
    context.answered_well()
    context.answered_well()
    assert counted == [1]


@pytest.mark.parametrize(
    ("failure", "again", "status"),
    [(Failure.DEAD, True, 503), (Failure.TIMEOUT, False, 504), (Failure.LOCAL, False, 503)],
)
def test_only_the_leg_of_an_engine_that_is_dead_is_sent_again(
    failure: Failure, again: bool, status: int
) -> None:
    context = request()
    assert note(context, failed(failure)) is again
    answer = answer_of(context)
    assert isinstance(answer, ApiError)
    assert answer.status == status
