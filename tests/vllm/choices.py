"""Requests for several choices, and where two answers to one differ; from real engines."""

import json
from typing import Any

from tests.fakes.openai_cases import CHAT, COMPLETIONS, events
from tests.vllm.engines import ask

Json = dict[str, Any]

TEXTS = ["def first(self): return", "while true: yield lambda none", "import class"]
TOKENS = [list(range(100, 190)), list(range(300, 333)), [500]]
MESSAGES = [{"role": "user", "content": "def class return import"}]
NEAR = 1e-3  # between logprobs of batches of other sizes
DEADLINE_S = 120.0

_DRAWN: Json = {"temperature": 0.9, "seed": 11}
_GREEDY: Json = {"temperature": 0}
_FORMS: list[Json] = [
    {"prompt": TEXTS, **_GREEDY},
    {"prompt": TOKENS, **_GREEDY},
    {"prompt": TEXTS[:1], **_GREEDY, "logprobs": 1},
    {"prompt": TOKENS, **_GREEDY, "logprobs": 2},
    {"prompt": TEXTS, **_GREEDY, "echo": True},
    {"prompt": TOKENS, **_GREEDY, "echo": True, "logprobs": 2},
    {"prompt": TEXTS[0], "n": 1, **_DRAWN},
    {"prompt": TEXTS[0], "n": 2, **_DRAWN},
    {"prompt": TOKENS[0], "n": 3, **_DRAWN},
    {"prompt": TOKENS, "n": 2, **_DRAWN, "logprobs": 2},
    {"prompt": TEXTS, "n": 3, **_DRAWN, "best_of": 3, "cache_salt": "pepper"},
    {"prompt": TEXTS, "n": 2, **_DRAWN, "ignore_eos": False, "stop": ["a", "e"]},
    {"prompt": TEXTS, "n": 2, **_DRAWN, "structured_outputs": {"choice": ["yes", "no"]}},
    {"messages": MESSAGES, "n": 1, **_DRAWN},
    {"messages": MESSAGES, "n": 3, **_DRAWN},
    {"messages": MESSAGES, "n": 2, **_DRAWN, "logprobs": True, "top_logprobs": 2},
]


def several() -> list[Json]:
    """Requests for several choices: every form whole, streamed, and streamed with usage."""
    ways: tuple[Json, ...] = (
        {},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
    )
    base = {"model": "tiny", "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    return [{**base, **form, **way} for form in _FORMS for way in ways]


def told(address: str, body: Json) -> tuple[list[Json], Json | None]:
    """Every choice, put together from its events where it came in a stream, and the usage."""
    path = CHAT if "messages" in body else COMPLETIONS
    status, data = ask(address, "POST", path, body, DEADLINE_S)
    assert status == 200, (body, data[:500])
    if not body.get("stream"):
        answer = json.loads(data)
        return answer["choices"], answer["usage"]
    chunks = events(data)
    assert len({chunk["id"] for chunk in chunks}) == 1
    usage = [chunk["usage"] for chunk in chunks if not chunk["choices"]]
    assert len(usage) == ("stream_options" in body)
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            _join(choices.setdefault(part["index"], {}), part)
    return [choices[index] for index in sorted(choices)], usage[0] if usage else None


def _join(whole: Json, part: Json) -> None:
    """Add an event's part of a choice. Offsets in a text depend on how tokens share events."""
    for key, value in part.items():
        if key == "text_offset":
            continue
        held = whole.get(key)
        if isinstance(value, dict):
            _join(whole.setdefault(key, {}), value)
        elif key != "index" and isinstance(held, str | list) and isinstance(value, str | list):
            whole[key] = held + value  # type: ignore[operator]
        elif value is not None:
            whole[key] = value


def difference(one: Any, other: Any, at: str = "") -> str:
    """Where two answers first differ; '' where they are equal, and their logprobs near.

    Of the likeliest tokens beside the chosen ones the logprobs are compared, not the names: those
    change places where they are as likely.
    """
    if isinstance(one, float) and isinstance(other, float):
        return "" if abs(one - other) <= NEAR else f"{at}: {one} and {other}"
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        parts = ((key, _plain(key, one[key]), _plain(key, other[key])) for key in one)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        parts = ((str(place), *pair) for place, pair in enumerate(zip(one, other, strict=True)))
    else:
        return "" if one == other else f"{at}: {one!r} and {other!r}"
    found = (difference(mine, theirs, f"{at}/{name}") for name, mine, theirs in parts)
    return next(filter(None, found), "")


def _plain(key: str, value: Any) -> Any:
    return _ranked(value) if key == "top_logprobs" else value


def _ranked(tops: Any) -> list[Any]:
    """The logprobs of the likeliest tokens, by position where there are several."""
    if all(isinstance(top, dict) and "logprob" in top for top in tops or ()):
        return sorted(top["logprob"] for top in tops or ())
    return [sorted((top or {}).values()) for top in tops]


def tokens(choices: list[Json]) -> int:
    """How many token ids the choices have."""
    return sum(len(choice.get("token_ids") or []) for choice in choices)
