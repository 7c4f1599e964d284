"""The table of parameters as requests: each parameter on each endpoint, whole and streamed."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.vllm.engines import ask

from kvrouter.engines.families.parameters import VLLM

Json = dict[str, Any]
DEADLINE_S = 180.0
CLOSE = 2e-2  # of logprobs: a prompt computed in other pieces
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
    }
]
SAMPLED = {"temperature": 0.8, "seed": 11}
GIVEN: Json = {
    "tools": {"tools": TOOLS, "tool_choice": "none"},
    "tool_choice": {"tools": TOOLS, "tool_choice": "none"},
    "parallel_tool_calls": {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False},
    "continue_final_message": {"continue_final_message": True, "add_generation_prompt": False},
    "add_generation_prompt": {"add_generation_prompt": False},
    "chat_template_kwargs": {"chat_template_kwargs": {"colour": "red"}},
    "documents": {"documents": [{"title": "t", "text": "d"}]},
    "reasoning_effort": {"reasoning_effort": "low"},
    "response_format": {"response_format": {"type": "json_object"}},
    "add_special_tokens": {"add_special_tokens": False},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 40},
    "truncation_side": {"truncate_prompt_tokens": 40, "truncation_side": "left"},
    "suffix": {"suffix": " end"},
    "cache_salt": {"cache_salt": "pepper"},
    "max_tokens": {"max_tokens": 5},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "min_tokens": {"min_tokens": 8, "ignore_eos": False},
    "ignore_eos": {"ignore_eos": False},
    "stop": {"stop": ["e"]},
    "stop_token_ids": {"stop_token_ids": list(range(300, 900))},
    "bad_words": {"bad_words": ["def", "class"]},
    "include_stop_str_in_output": {"stop": ["e"], "include_stop_str_in_output": True},
    "n": {"n": 1},
    "best_of": {"best_of": 3},
    "use_beam_search": {"use_beam_search": True, "n": 1, "return_token_ids": False},
    "length_penalty": {"length_penalty": 1.0},
    "temperature": SAMPLED,
    "seed": SAMPLED,
    "top_p": {**SAMPLED, "top_p": 0.8},
    "top_k": {**SAMPLED, "top_k": 9},
    "min_p": {**SAMPLED, "min_p": 0.1},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "presence_penalty": {"presence_penalty": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {"20": 8.0}},
    "allowed_token_ids": {"allowed_token_ids": [20, 21, 22, 23]},
    "structured_outputs": {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False},
    "stream_options": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "echo": {"echo": True},
    "logprob_token_ids": {"logprob_token_ids": [20, 21], "logprobs": 2},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "return_prompt_text": {"return_prompt_text": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "return_tokens_as_token_ids": {"logprobs": 1, "return_tokens_as_token_ids": True},
    "kv_transfer_params": {"kv_transfer_params": {"do_remote_decode": True}},
    "ec_transfer_params": {"ec_transfer_params": {"a": 1}},
    "media_io_kwargs": {"media_io_kwargs": {}},
    "mm_processor_kwargs": {"mm_processor_kwargs": {}},
    "mm_payload": {"mm_payload": "none"},
    "vllm_xargs": {"vllm_xargs": {"colour": "red"}},
    "user": {"user": "u"},
    "request_id": {"request_id": "mine"},
    "session_id": {"session_id": "s"},
    "stream_interval": {"stream_interval": 2},
}
"""What is given for a parameter, where the number 1 would not do."""
REFUSED: Json = {"vllm_xargs": {"vllm_xargs": {"kv_transfer_params": "x"}}}
"""What the router does not serve, beside what engines take."""
CHANGING = {
    *("id", "created", "system_fingerprint", "metrics"),
    *("cached_tokens", "created_cache_tokens", "kv_transfer_params"),
    "top_logprobs",  # in a batch vLLM 0.32 names a token of -9999 among the best now and then
}
"""Members of answers that differ from one to the next, of one engine alone too."""


@dataclass(frozen=True)
class Case:
    """One cell of the matrix as a request."""

    parameter: str
    kind: str
    stream: bool
    body: Json

    @property
    def name(self) -> str:
        """As a failure is told."""
        return f"{self.parameter} ({self.kind}{', streamed' if self.stream else ''})"


def cases(*, refused: bool = False) -> list[Case]:
    """Every parameter on every endpoint that knows it, whole and streamed."""
    return [
        Case(name, kind, stream, _body(kind, number, stream, (REFUSED if refused else GIVEN), name))
        for number, (name, kind) in enumerate(_pairs())
        for stream in (False, True)
        if not refused or name in REFUSED
    ]


def _pairs() -> Iterator[tuple[str, str]]:
    for name, row in VLLM.rows.items():
        yield from ((name, kind) for kind in sorted(row.kinds))


def _body(kind: str, number: int, stream: bool, given: Json, name: str) -> Json:
    words = " ".join(f"def f{number}_{word}(self): return {word}" for word in range(12))
    body: Json = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "stream": stream}
    if kind == "chat":
        last = "assistant" if name == "continue_final_message" else "user"
        body["messages"] = [{"role": last, "content": words}]
    else:
        body["prompt"] = words
    if stream:
        body["stream_options"] = {"include_usage": True}
    if name in body and name not in given:
        return body
    more = dict(given.get(name, {name: 1}))
    if kind == "chat" and "logprobs" in more:
        more["logprobs"] = True
    if not stream:
        more.pop("stream_options", None)
    return body | more


def outcome(address: str, case: Case) -> tuple[int, Any]:
    """Status and what is said, in a form that can be compared."""
    status, data = ask(address, "POST", PATHS[case.kind], case.body, DEADLINE_S)
    if status != 200:
        return status, json.loads(data)["error"].get("param")
    if not case.stream:
        return status, _settled(json.loads(data))
    events = [json.loads(line[6:]) for line in data.decode().split("\n") if line[:7] == "data: {"]
    for event in events:
        if "error" in event:  # some engines find out only when the stream has begun
            return event["error"]["code"], event["error"].get("param")
    return status, _gathered(events)


def _settled(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: _settled(each) for key, each in value.items() if key not in CHANGING}
        return {key: each for key, each in kept.items() if each not in (None, {}, [])}
    return [_settled(each) for each in value] if isinstance(value, list) else value


def _gathered(events: list[Json]) -> Json:
    """A stream as one answer: texts, token ids and logprobs joined, the last usage."""
    text, usage, reason = "", None, None
    tokens: list[int] = []
    probabilities: list[float] = []
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice.get("delta", choice)
            text += delta.get("content") or delta.get("text") or ""
            tokens += choice.get("token_ids") or []
            reason = choice.get("finish_reason") or reason
            told = choice.get("logprobs") or {}
            probabilities += told.get("token_logprobs") or [
                each["logprob"] for each in told.get("content") or []
            ]
    gathered = {"text": text, "tokens": tokens, "usage": usage, "reason": reason}
    return {**_settled(gathered), "logprobs": probabilities}


def difference(one: Any, other: Any, where: str = "") -> str:
    """'' where two answers are equal, but for the last digits of logprobs; else what differs."""
    if isinstance(one, float) and isinstance(other, float):
        return "" if math.isclose(one, other, abs_tol=CLOSE) else f"{where}: {one}, not {other}"
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{where}: {sorted(one)}, not {sorted(other)}"
        told = (difference(one[key], other[key], f"{where}.{key}") for key in one)
        return next(filter(None, told), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        told = (difference(*pair, f"{where}[]") for pair in zip(one, other, strict=True))
        return next(filter(None, told), "")
    return "" if one == other else f"{where}: {one}, not {other}"[:300]
