"""What an engine of vLLM's dialect answers, as data: held against the simulator and real engines.

Everything here was read off vLLM 0.32 (vllm/entrypoints, vllm/sampling_params.py) and holds for any
model. `{model}` stands for the served name; MAX_MODEL_LEN for the engine's own limit.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "The quick brown fox jumps over the lazy dog."
TOKENS = [11, 12, 13, 14, 15, 16, 17]
MESSAGES = [{"role": "user", "content": PROMPT}]
Json = dict[str, Any]

Ask = Callable[[str, str, bytes | None], tuple[int, bytes]]
"""Sends (method, path, body) as application/json and returns status and body."""


@dataclass(frozen=True)
class Refusal:
    """A request that must be refused: with which status, type and param (None: any)."""

    name: str
    path: str
    body: Mapping[str, Any] | bytes
    status: int = 400
    type: str | None = None
    param: str | None = None


@dataclass(frozen=True)
class Accepted:
    """A request that must be answered with this many tokens."""

    name: str
    path: str
    body: Mapping[str, Any]
    tokens: int
    keys: tuple[str, ...] = field(default=("id", "object", "created", "model", "choices", "usage"))


def _text(**more: Any) -> Json:
    return {"model": "{model}", "prompt": PROMPT, "max_tokens": 4, **more}


def _chat(**more: Any) -> Json:
    return {"model": "{model}", "messages": MESSAGES, "max_tokens": 4, **more}


def _refused_choices(long: list[int]) -> tuple[Refusal, ...]:
    return (
        Refusal("no choices at all", COMPLETIONS, _text(n=0)),
        Refusal("two greedy choices", COMPLETIONS, _text(n=2, temperature=0)),
        Refusal("two greedy choices in a chat", CHAT, _chat(n=2, temperature=0)),
        Refusal("a text and token ids", COMPLETIONS, _text(prompt=["a", 1])),
        Refusal("texts and lists of token ids", COMPLETIONS, _text(prompt=["a", [1]])),
        Refusal("too many prompts", COMPLETIONS, _text(prompt=["a"] * 1025), param="prompt"),
        Refusal("one prompt of two too long", COMPLETIONS, _text(prompt=[[7], long])),
    )


def _refused_lengths(max_model_len: int, long: list[int]) -> tuple[Refusal, ...]:
    return (
        Refusal(
            "a prompt longer than the context",
            COMPLETIONS,
            _text(prompt=long),
            param="input_tokens",
        ),
        Refusal(
            "a chat longer than the context",
            CHAT,
            _chat(messages=[{"role": "user", "content": "7 " * (max_model_len + 1)}]),
            param="input_tokens",
        ),
        Refusal("a prompt as long as the context", COMPLETIONS, _text(prompt=long[1:])),
    )


def refusals(max_model_len: int) -> tuple[Refusal, ...]:
    """Requests that an engine with this context length refuses."""
    long = [7] * (max_model_len + 1)
    return (
        Refusal(
            "stream options without a stream",
            COMPLETIONS,
            _text(stream_options={"include_usage": True}),
            param="stream_options",
        ),
        Refusal(
            "stream options without a stream in a chat",
            CHAT,
            _chat(stream=False, stream_options={"include_usage": True}),
            param="stream_options",
        ),
        Refusal("more min_tokens than max_tokens", COMPLETIONS, _text(min_tokens=5)),
        Refusal("more min_tokens than max_tokens in a chat", CHAT, _chat(min_tokens=5)),
        Refusal("negative min_tokens", COMPLETIONS, _text(min_tokens=-1)),
        Refusal(
            "an unknown model", COMPLETIONS, _text(model="nobody"), 404, "NotFoundError", "model"
        ),
        Refusal(
            "an unknown model in a chat", CHAT, _chat(model="nobody"), 404, "NotFoundError", "model"
        ),
        Refusal("no tokens at all", COMPLETIONS, _text(max_tokens=0), param="max_tokens"),
        Refusal("tokens in words", COMPLETIONS, _text(max_tokens="five")),
        Refusal(
            "more tokens than the context",
            COMPLETIONS,
            _text(max_tokens=max_model_len + 1),
            param="max_tokens",
        ),
        *_refused_lengths(max_model_len, long),
        Refusal("a temperature below 0", COMPLETIONS, _text(temperature=-1), param="temperature"),
        Refusal("a temperature above 2", CHAT, _chat(temperature=2.5), param="temperature"),
        Refusal("a top_p of 0", COMPLETIONS, _text(top_p=0), param="top_p"),
        Refusal("a presence penalty of 3", COMPLETIONS, _text(presence_penalty=3)),
        *_refused_choices(long),
        Refusal("an empty prompt", COMPLETIONS, _text(prompt=""), param="prompt"),
        Refusal("no prompt", COMPLETIONS, {"model": "{model}"}, param="prompt"),
        Refusal("a prompt that is a number", COMPLETIONS, _text(prompt=7)),
        Refusal("a negative token id", COMPLETIONS, _text(prompt=[1, -2])),
        Refusal("an empty salt", COMPLETIONS, _text(cache_salt="")),
        Refusal("no messages", CHAT, {"model": "{model}"}),
        Refusal("messages that are text", CHAT, _chat(messages="hello")),
        Refusal("a body that is not JSON", COMPLETIONS, b'{"model": '),
        Refusal("a body that is a list", COMPLETIONS, b"[1, 2]"),
        Refusal("an unknown path", "/v1/nothing", _text(), 404),
    )


ACCEPTED: tuple[Accepted, ...] = (
    Accepted("a text", COMPLETIONS, _text(ignore_eos=True), 4),
    Accepted("token ids", COMPLETIONS, _text(prompt=TOKENS, ignore_eos=True), 4),
    Accepted("a text without a count", COMPLETIONS, {"prompt": PROMPT, "ignore_eos": True}, 16),
    Accepted("one token", COMPLETIONS, _text(max_tokens=1), 1),
    Accepted("unknown parameters", COMPLETIONS, _text(ignore_eos=True, colour="red"), 4),
    Accepted("min_tokens at max_tokens", COMPLETIONS, _text(min_tokens=4), 4),
    Accepted("a salt", COMPLETIONS, _text(ignore_eos=True, cache_salt="pepper"), 4),
    Accepted(
        "parameters of a KV transfer",
        COMPLETIONS,
        _text(ignore_eos=True, kv_transfer_params={"do_remote_decode": True}),
        4,
    ),
    Accepted("a chat", CHAT, _chat(ignore_eos=True), 4),
    Accepted(
        "a chat by its newer name",
        CHAT,
        {**_chat(ignore_eos=True, max_completion_tokens=5), "max_tokens": None},
        5,
    ),
    Accepted(
        "a chat with a system message",
        CHAT,
        _chat(messages=[{"role": "system", "content": "Be brief."}, *MESSAGES], ignore_eos=True),
        4,
    ),
)


def encoded(body: Mapping[str, Any] | bytes, model: str) -> bytes:
    """The bytes to send, with the model's name in place."""
    if isinstance(body, bytes):
        return body
    filled = {key: model if value == "{model}" else value for key, value in body.items()}
    return json.dumps(filled).encode()


def check_refusal(ask: Ask, model: str, case: Refusal) -> None:
    """AssertionError where the engine does not refuse as it must."""
    status, body = ask("POST", case.path, encoded(case.body, model))
    assert status == case.status, f"{case.name}: {status} {body[:300]!r}"
    if case.path == "/v1/nothing":
        return
    error = json.loads(body)["error"]
    assert error["code"] == case.status, case.name
    assert isinstance(error["message"], str), case.name
    assert error["message"], case.name
    if case.type is not None:
        assert error["type"] == case.type, case.name
    if case.param is not None:
        assert error["param"] == case.param, f"{case.name}: {error}"


def check_accepted(ask: Ask, model: str, case: Accepted) -> None:
    """AssertionError where the answer has not the shape and count that it must have."""
    status, body = ask("POST", case.path, encoded(case.body, model))
    assert status == 200, f"{case.name}: {status} {body[:300]!r}"
    answer = json.loads(body)
    assert set(case.keys) <= set(answer), case.name
    usage = answer["usage"]
    assert usage["completion_tokens"] == case.tokens, case.name
    assert usage["total_tokens"] == usage["prompt_tokens"] + case.tokens, case.name
    (choice,) = answer["choices"]
    assert choice["index"] == 0, case.name
    assert choice["finish_reason"] == "length", case.name
    if case.path == CHAT:
        assert answer["object"] == "chat.completion", case.name
        assert choice["message"]["role"] == "assistant", case.name
        assert isinstance(choice["message"]["content"], str), case.name
    else:
        assert answer["object"] == "text_completion", case.name
        assert isinstance(choice["text"], str), case.name


def check_choices(ask: Ask, model: str, path: str) -> None:
    """Choices stand in the order of prompts and then samples; the i-th sample has the seed + i."""
    prompts: list[Json] = [{"prompt": TOKENS}, {"prompt": [*TOKENS, 18]}]
    asked = _text if path == COMPLETIONS else _chat
    if path == CHAT:
        prompts = [{"messages": MESSAGES}]
    drawn = {"ignore_eos": True, "temperature": 1.0, "return_token_ids": True}
    alone = [
        json.loads(ask("POST", path, encoded(asked(**drawn, **p, seed=7 + i), model))[1])
        for p in prompts
        for i in range(2)
    ]
    whole = prompts[0]
    if path == COMPLETIONS:
        whole = {"prompt": [p["prompt"] for p in prompts]}
    status, body = ask("POST", path, encoded(asked(**drawn, **whole, seed=7, n=2), model))
    assert status == 200, body
    told = json.loads(body)
    assert [choice["index"] for choice in told["choices"]] == list(range(len(alone)))
    said = [choice["token_ids"] for choice in told["choices"]]
    assert said == [one["choices"][0]["token_ids"] for one in alone]
    assert said[0] != said[1]
    usage, each = told["usage"], [one["usage"] for one in alone]
    assert usage["completion_tokens"] == 4 * len(alone)
    assert usage["prompt_tokens"] == sum(one["prompt_tokens"] for one in each[::2])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    more = {**drawn, **whole, **options, "seed": 7, "n": 2}
    *chunks, last = events(ask("POST", path, encoded(asked(**more), model))[1])
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == usage["total_tokens"]
    streamed: list[list[int]] = [[] for _ in alone]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice.get("token_ids") or []
    assert streamed == said


def events(body: bytes) -> list[Json]:
    """The decoded events of a stream; its last one must be the end mark."""
    frames = [frame for frame in body.decode().split("\n\n") if frame]
    assert all(frame.startswith("data: ") for frame in frames)
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame[len("data: ") :]) for frame in frames[:-1]]


def check_stream(ask: Ask, model: str, path: str) -> None:
    """A stream says token by token what the whole answer says, then its usage, then its end."""
    ask_for = _chat if path == CHAT else _text
    more = {"ignore_eos": True, "temperature": 0, "return_token_ids": True, "max_tokens": 6}
    _, whole = ask("POST", path, encoded(ask_for(**more), model))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    status, body = ask("POST", path, encoded(ask_for(**more, **options), model))
    assert status == 200
    *chunks, last = events(body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    answer = json.loads(whole)
    told = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or []]
    assert told == answer["choices"][0]["token_ids"]
    assert len(told) == 6
    where = chunks[0] if path == CHAT else chunks[0]["choices"][0]
    full = answer if path == CHAT else answer["choices"][0]
    assert where["prompt_token_ids"] == full["prompt_token_ids"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    if path == CHAT:
        assert chunks[0]["object"] == "chat.completion.chunk"
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert said == answer["choices"][0]["message"]["content"]
    else:
        assert chunks[0]["object"] == "text_completion"
        said = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert said == answer["choices"][0]["text"]


def check_usage_only_when_asked(ask: Ask, model: str) -> None:
    """A stream without include_usage has no usage chunk."""
    _, body = ask("POST", COMPLETIONS, encoded(_text(stream=True, ignore_eos=True), model))
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in events(body))


def check_tokenize(ask: Ask, model: str) -> None:
    """/tokenize gives the ids that a prompt, or a conversation, has in an answer."""
    for path, asked, body in (
        (COMPLETIONS, {"prompt": PROMPT}, _text(return_token_ids=True, max_tokens=1)),
        (CHAT, {"messages": MESSAGES}, _chat(return_token_ids=True, max_tokens=1)),
    ):
        status, tokenized = ask("POST", "/tokenize", encoded({"model": "{model}", **asked}, model))
        assert status == 200
        decoded = json.loads(tokenized)
        assert decoded["count"] == len(decoded["tokens"]) > 1
        assert decoded["max_model_len"] > 1
        answer = json.loads(ask("POST", path, encoded(body, model))[1])
        holder = answer if path == CHAT else answer["choices"][0]
        assert holder["prompt_token_ids"] == decoded["tokens"]


def check_endpoints(ask: Ask, model: str) -> None:
    """Health, version, models and metrics."""
    assert ask("GET", "/health", None)[0] == 200
    assert "version" in json.loads(ask("GET", "/version", None)[1])
    (card,) = json.loads(ask("GET", "/v1/models", None)[1])["data"]
    assert card["id"] == model
    assert card["object"] == "model"
    assert card["owned_by"] == "vllm"
    assert card["max_model_len"] > 1
    status, exposition = ask("GET", "/metrics", None)
    assert status == 200
    for name in METRICS:
        assert f"\n{name}{{" in exposition.decode(), name
    assert ask("GET", COMPLETIONS, None)[0] == 405


METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:cache_config_info",
)
