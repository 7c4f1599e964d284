"""All turns of a session get one version of its model."""

from collections import Counter
from math import sqrt
from typing import Any

import orjson
import pytest

from kvrouter.openai.request import Request, parse
from kvrouter.prefix.learnt import session_of
from kvrouter.serving.request.versions import version_of

SESSIONS, TURNS = 2000, 4
WEIGHTS = {"a": 90, "b": 10}
Turn = tuple[Request, dict[str, str]]


def turn(number: int, turns: int, headers: dict[str, str], **more: Any) -> Turn:
    """A request of a session in which the user has spoken so often."""
    messages = [{"role": "system", "content": "You are kind."}]
    for said in range(turns):
        messages.append({"role": "user", "content": f"{number} says {said}"})
        messages.append({"role": "assistant", "content": "Indeed."})
    body = {"model": "chat", "messages": messages[:-1], **more}
    return parse(orjson.dumps(body), "chat", 1), headers


def by_its_beginning(number: int, turns: int) -> Turn:
    return turn(number, turns, {})


def by_a_header(number: int, turns: int) -> Turn:
    return turn(turns, turns, {"x-mine": f"session {number}"})


def by_its_cache_key(number: int, turns: int) -> Turn:
    return turn(turns, turns, {}, prompt_cache_key=f"session {number}")


@pytest.mark.parametrize("told", [by_its_beginning, by_a_header, by_its_cache_key])
def test_all_turns_of_a_session_get_one_version_and_each_version_its_share(told: Any) -> None:
    shares: Counter[str] = Counter()
    for number in range(SESSIONS):
        turns = (told(number, turns) for turns in range(1, TURNS + 1))
        sessions = {session_of(request, headers, "x-mine") for request, headers in turns}
        (version,) = {version_of(session, WEIGHTS) for session in sessions if session}
        assert None not in sessions
        shares[version] += 1
    deviation = sqrt(SESSIONS * 0.9 * 0.1)
    assert abs(shares["b"] - 0.1 * SESSIONS) < 4 * deviation
    assert shares.total() == SESSIONS
