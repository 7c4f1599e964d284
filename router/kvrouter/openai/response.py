"""Answers of engines: what clients may see of them, and what the router reads in them. Pure."""

from __future__ import annotations

import re
from typing import Final

import orjson

from kvrouter.http.bounded_json import bounded, read_answer
from kvrouter.openai.sse import map_data

PromptUsage = tuple[int | None, int | None]
"""Tokens of a prompt, and cached ones of them, by an engine's usage; None: there is none."""
TRANSFERS: Final = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disaggregated_params",
    }
)
"""Members of answers that only router and engines use."""
MARKS: Final = (b'_params":', b'_host":', b'_port":', b'_room":', b'_tokens":')
"""Ends of the names of all members that `tidy_events` changes; they begin with the same byte."""
CONTENT: Final = re.compile(rb"(?:^|[\r\n])event:[^\r\n]*[._]delta")
"""The name of an event with a part of the answer."""
_NAMES: Final = tuple(b'"%b":' % name.encode() for name in sorted(TRANSFERS))
_CACHED: Final = re.compile(rb'("prompt_tokens_details":\s*\{[^{}]*"cached_tokens":\s*)\d{1,12}')
_FINISH_REASON: Final = re.compile(rb'"finish_reason":\s*"([a-z_]{1,32})"')
_PROMPT_TOKENS: Final = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,12})(?!\d)')
_CACHED_TOKENS: Final = re.compile(rb'"cached_tokens":\s*(\d{1,12})(?!\d)')
_GENERATED: Final = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,12})(?!\d)')


def is_json(body: bytes) -> bool:
    """Whether `body` can be an answer of OpenAI's API, by its first and last character alone."""
    body = body.strip()
    return body[:1] + body[-1:] in (b"{}", b"[]")


def tidy_answer(body: bytes, cached_tokens: int | None) -> bytes:
    """The decode leg's whole answer as the client may see it; `body` itself if nothing differs.

    Transfer parameters are left out, and cached tokens are those of the prefill leg: the decode
    engine counts what it loaded from the store as cached (vllm-router issue 193).
    """
    if cached_tokens is not None and b'"cached_tokens"' in body:
        found = _CACHED.search(body)  # `sub` takes five times as long
        if found is not None:
            body = b"%b%d%b" % (body[: found.end(1)], cached_tokens, body[found.end() :])
    names = _NAMES if _may_transfer(body) else ()
    at = min((at for name in names if (at := body.find(name)) >= 0), default=-1)
    if at < 0:
        return body
    return _without_last(body, at) or _without_transfers(body)


def tidy_events(data: bytes, cached_tokens: int | None) -> bytes:
    """The same of whole events of a stream."""
    if cached_tokens is not None and b'"cached_tokens"' in data:
        data = _CACHED.sub(rb"\g<1>%d" % cached_tokens, data)
    return map_data(data, _without_transfers) if _may_transfer(data) else data


def _may_transfer(body: bytes) -> bool:
    return b'_params":' in body or b'"bootstrap_' in body  # sooner than each name


def _without_transfers(body: bytes) -> bytes:
    """The JSON object without its transfer parameters; itself if it has none, or is too much."""
    try:
        answer = read_answer(body) if _may_transfer(body) else None
    except ValueError:
        return body
    if not isinstance(answer, dict):
        return body
    choices, kept = answer.get("choices"), True
    for part in (answer, answer.get("response"), *(choices if isinstance(choices, list) else ())):
        for key in TRANSFERS & part.keys() if isinstance(part, dict) else ():
            del part[key]
            kept = False
    return body if kept else orjson.dumps(answer)


def _without_last(body: bytes, at: int) -> bytes | None:
    """The object of `body` without its last members from `at` on, if all of them are transfers.

    vLLM puts them last, so that a long answer (logprobs) need not be read and written again.
    """
    head = body[:at].rstrip()
    if not head.endswith(b",") or not body.rstrip().endswith(b"}"):
        return None
    try:
        last = orjson.loads(bounded(b"{" + body[at:]))
    except ValueError:
        return None
    return None if last.keys() - TRANSFERS else head[:-1] + b"}"


def answer_usage(body: bytes) -> tuple[PromptUsage, int]:
    """What the usage of a whole answer says of its prompt, and how many tokens were generated.

    Found from the last place of its key on, without decoding the answer: text cannot fake it,
    because a quote within a JSON string is escaped, but what the model wrote as JSON may.
    """
    usage = _end_from(b'"usage":', body)
    return prompt_usage(usage), generated_tokens(usage, 0, whole=True)


def answer_reason(body: bytes) -> str:
    """The last finish reason of a whole answer, likewise; "unknown" if there is none."""
    return finish_reason(_end_from(b'"finish_reason":', body))


def finish_reason(tail: bytes) -> str:
    """The last finish reason in the end of a stream; "unknown" if there is none."""
    found = _FINISH_REASON.findall(tail)
    return found[-1].decode("ascii") if found else "unknown"


def prompt_usage(tail: bytes) -> PromptUsage:
    """What the last usage in an answer or in the end of a stream says of the prompt."""
    found, cached = _PROMPT_TOKENS.findall(tail), _CACHED_TOKENS.findall(tail)
    return int(found[-1]) if found else None, int(cached[-1]) if cached else None


def generated_tokens(tail: bytes, events: int, *, whole: bool) -> int:
    """Tokens of a stream so far: as the last usage says, else one for each event.

    Args:
        tail: its end.
        events: server-sent events so far, without the end mark.
        whole: whether the stream has ended. Before that a usage may be that of one choice of
            several (`continuous_usage_stats`), and counts only if it is more than the events.
    """
    found = _GENERATED.findall(tail)
    counted = int(found[-1]) if found else None
    if whole and counted is not None:
        return counted
    return max(events, counted or 0)


def _end_from(key: bytes, body: bytes) -> bytes:
    return body[max(0, body.rfind(key)) :]
