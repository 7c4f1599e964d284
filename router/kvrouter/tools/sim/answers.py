"""The JSON of a simulated engine, in the shapes of vLLM 0.32. Pure: values to bytes.

Anthropic's /v1/messages and OpenAI's /v1/responses are served as chats, in the shapes of
vllm/entrypoints/anthropic and vllm/entrypoints/openai/responses.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import orjson

from kvrouter.errors import bad_request
from kvrouter.openai import sse
from kvrouter.openai.endpoints import RESPONSES
from kvrouter.tools.sim.requests import GenerateRequest

Json = Mapping[str, Any]
_TURNS: Final = {"function_call": "assistant", "function_call_output": "tool"}
_ECHOED: Final = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": ()} | dict.fromkeys(
    ("instructions", "max_output_tokens", "metadata", "temperature", "text", "top_p")
)
"""What a response repeats of its request, and what it says by default."""


def models_body(
    names: Sequence[str], root: str, max_model_len: int, created: int, adapters: Mapping[str, str]
) -> bytes:
    """The answer of /v1/models; `adapters` are the paths of the loaded ones by name."""

    def card(name: str, root: str, parent: str | None, length: int | None) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": created, "owned_by": "vllm"}
        return about | {"root": root, "parent": parent, "max_model_len": length}

    cards = [card(name, root, None, max_model_len) for name in names]
    cards += [card(name, path, names[0], None) for name, path in adapters.items()]
    return orjson.dumps({"object": "list", "data": cards})


@dataclass
class SimAnswer:
    """The answer of an engine to one choice; its tokens, and what it calls, may be given."""

    request: GenerateRequest
    cached_tokens: int
    kv_transfer_params: dict[str, Any] | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    given: list[int] = field(default_factory=list)
    function: str = ""
    call_id: str = field(default_factory=lambda: f"chatcmpl-tool-{uuid4().hex}")


class Writer:
    """The answer of one request, whole or as server-sent events.

    Choices are numbered as in vLLM: those of the first prompt, those of the second, and so on.
    `name` is part of the answer's id.
    """

    def __init__(self, request: GenerateRequest, name: str | None = None) -> None:
        self._request = request
        self._chat = request.kind == "chat"
        self._named_prompts: set[int] = set()
        whole, streamed = "chat.completion", "chat.completion.chunk"
        if not self._chat:
            whole = streamed = "text_completion"
        self._head: dict[str, Any] = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + (name or uuid4().hex),
            "object": streamed if request.stream else whole,
            "created": int(time.time()),
            "model": request.model,
        }

    def body(self, answers: Sequence[SimAnswer]) -> bytes:
        """The whole answer, with all choices."""
        whole: dict[str, Any] = {
            **self._head,
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": self._usage(answers),
            "kv_transfer_params": answers[0].kv_transfer_params,
        }
        if self._chat:
            asked = self._request.return_token_ids
            whole["prompt_token_ids"] = self._request.prompts[0] if asked else None
        return orjson.dumps(whole)

    def opening(self, index: int) -> bytes:
        """The event before a choice's first token: the role in a chat, else nothing."""
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event(choice, None)

    def token(self, index: int, answer: SimAnswer, token: int, text: str, last: bool) -> bytes:
        """The event of one token of a choice; the last one has the reason why it ended."""
        reason = _reason(answer) if last else None
        choice: dict[str, Any] = {"index": index}
        if answer.function:
            more = {"function": {"arguments": text}}
            call = _call(answer, text) if len(answer.tokens) == 1 else more
            choice["delta"] = {"tool_calls": [{"index": 0, **call}]}
        elif self._chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": reason, "stop_reason": None}
        if self._request.return_token_ids:
            choice["token_ids"] = [token]
        return self._event(choice, answer)

    def closing(self, answers: Sequence[SimAnswer]) -> bytes:
        """The usage, if the request asks for it, and the end mark."""
        if not self._request.include_usage:
            return sse.DONE_EVENT
        whole = {**self._head, "choices": [], "usage": self._usage(answers)}
        return sse.event(orjson.dumps(whole)) + sse.DONE_EVENT

    def _choice(self, index: int, answer: SimAnswer) -> dict[str, Any]:
        asked = self._request.return_token_ids
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": answer.text}
            if answer.function:
                choice["message"] |= {"content": "", "tool_calls": [_call(answer, answer.text)]}
        else:
            choice["text"] = answer.text
        choice |= {
            "logprobs": None,
            "finish_reason": _reason(answer),
            "stop_reason": None,
            "token_ids": answer.tokens if asked else None,
        }
        if not self._chat:
            choice["prompt_token_ids"] = answer.request.prompt if asked else None
        return choice

    def _usage(self, answers: Sequence[SimAnswer]) -> dict[str, Any]:
        """The usage of all choices; a prompt counts once for all its samples."""
        prompts = answers[:: self._request.n]
        usage = _usage(
            sum(len(answer.request.prompt) for answer in prompts),
            sum(len(answer.tokens) for answer in answers),
        )
        cached = sum(answer.cached_tokens for answer in prompts)
        return usage | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _event(self, choice: dict[str, Any], answer: SimAnswer | None) -> bytes:
        whole: dict[str, Any] = {**self._head, "choices": [choice]}
        request, index = self._request, choice["index"]
        prompt = request.prompts[index // request.n]
        first = not self._named_prompts if self._chat else index not in self._named_prompts
        if request.return_token_ids and first:
            self._named_prompts.add(index)
            target = whole if self._chat else choice
            target["prompt_token_ids"] = prompt
        if request.continuous_usage:
            whole["usage"] = _usage(len(prompt), len(answer.tokens) if answer else 0)
        return sse.event(orjson.dumps(whole))


def _reason(answer: SimAnswer) -> str:
    """As vLLM says it: "stop" after a call of a function that the client named."""
    form, ended = answer.request.form, answer.finish_reason
    return "tool_calls" if ended == "stop" and form is not None and form.required else ended


def _call(answer: SimAnswer, arguments: str) -> dict[str, Any]:
    function = {"name": answer.function, "arguments": arguments}
    return {"id": answer.call_id, "type": "function", "function": function}


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    whole = prompt + completion
    return {"prompt_tokens": prompt, "total_tokens": whole, "completion_tokens": completion}


def chat_of(data: Json, path: str) -> Json:
    """The chat that a request to `path` means. Raises ApiError: 400."""
    try:
        return {**data, "n": 1, **(_of_response(data) if path == RESPONSES else _of_messages(data))}
    except (AttributeError, LookupError, TypeError) as error:
        raise bad_request(f"The body is not valid: {error!r}.") from None


def _of_messages(data: Json) -> Json:
    choice = data.get("tool_choice") or {"type": None}
    chosen = {"any": "required", "tool": choice}.get(choice["type"], choice["type"])
    schema = (data.get("output_config") or {}).get("format")
    tools = data.get("tools") or ()
    chat = _chat(data.get("system"), data["messages"], tools, chosen, schema)
    return {**chat, "max_tokens": data["max_tokens"]}


def _of_response(data: Json) -> Json:
    said, choice = data["input"], data.get("tool_choice")
    turns = [{"role": "user", "content": said}] if isinstance(said, str) else map(_turn, said)
    tools = [tool for tool in data.get("tools") or () if tool["type"] == "function"]
    chosen = None if choice == "auto" else choice
    schema = (data.get("text") or {}).get("format")
    chat = _chat(data.get("instructions"), turns, tools, chosen, schema)
    return {**chat, "max_tokens": data.get("max_output_tokens")}


def _turn(item: Json) -> Json:
    role = _TURNS.get(item.get("type", ""))
    return item if role is None else {"role": role, "content": [item]}


def _chat(
    system: object, turns: Iterable[Any], tools: Iterable[Any], chosen: Any, schema: Any
) -> Json:
    named = {"type": "function", "function": chosen}
    return {
        "messages": [*([{"role": "system", "content": system}] if system else ()), *turns],
        "tools": [{"type": "function", "function": tool} for tool in tools] or None,
        "tool_choice": named if isinstance(chosen, dict) else chosen,
        "response_format": {**schema, "json_schema": schema} if schema else None,
    }


class MessagesWriter:
    """An answer of /v1/messages, whole or as events."""

    def __init__(self, request: GenerateRequest) -> None:
        about = {"id": f"chatcmpl-{uuid4().hex}", "type": "message", "role": "assistant"}
        self._head = {**about, "model": request.model, "content": []}
        self._prompt_tokens = len(request.prompt)

    def body(self, answers: Sequence[SimAnswer]) -> bytes:
        """The whole answer."""
        content = [_block(answer, answer.text) for answer in answers]
        end, usage = _end(answers[0])
        return orjson.dumps({**self._head, "content": content, **end, "usage": usage})

    def opening(self, index: int) -> bytes:
        """The event before the first token."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        end = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**self._head, **end, "usage": usage})

    def token(self, index: int, answer: SimAnswer, token: int, text: str, last: bool) -> bytes:
        """The event of one token; the first one has that of the block before it."""
        delta = {"type": "text_delta", "text": text}
        if answer.function:
            delta = {"type": "input_json_delta", "partial_json": text}
        event = _event("content_block_delta", index=0, delta=delta)
        if len(answer.tokens) > 1:
            return event
        return _event("content_block_start", index=0, content_block=_block(answer, "")) + event

    def closing(self, answers: Sequence[SimAnswer]) -> bytes:
        """Why it ended, the usage, and the end."""
        end, usage = _end(answers[0])
        delta = _event("message_delta", delta=end, usage=usage)
        return _event("content_block_stop", index=0) + delta + _event("message_stop")


def _event(kind: str, **members: Any) -> bytes:
    return b"event: %b\n" % kind.encode() + sse.event(orjson.dumps({"type": kind, **members}))


def _block(answer: SimAnswer, text: str) -> Json:
    if not answer.function:
        return {"type": "text", "text": text}
    about = {"type": "tool_use", "id": answer.call_id, "name": answer.function}
    whole = text and answer.finish_reason == "stop"
    return {**about, "input": orjson.loads(text) if whole else {}}


def _end(answer: SimAnswer) -> tuple[Json, Json]:
    """Why it ended, and its usage."""
    reason = "tool_use" if answer.function else "end_turn"
    reason = "max_tokens" if answer.finish_reason == "length" else reason
    cached, told = answer.cached_tokens, len(answer.tokens)
    usage = {"input_tokens": len(answer.request.prompt) - cached, "output_tokens": told}
    end = {"stop_reason": reason, "stop_sequence": None}
    return end, {**usage, "cache_read_input_tokens": cached}


class ResponsesWriter:
    """An answer of /v1/responses, whole or as numbered events; `data` is the request's body."""

    def __init__(self, request: GenerateRequest, data: Json) -> None:
        self._id = uuid4().hex
        about = {"id": f"resp_{self._id}", "object": "response", "created_at": int(time.time())}
        echoed = {name: data.get(name, usual) for name, usual in _ECHOED.items()}
        begun: Json = {"output": (), "usage": None, "incomplete_details": None}
        self._head = {**about, **echoed, "model": request.model, "status": "in_progress", **begun}
        self._events = 0

    def body(self, answers: Sequence[SimAnswer]) -> bytes:
        """The whole answer."""
        return orjson.dumps(self._whole(answers[0]))

    def opening(self, index: int) -> bytes:
        """The events before the first token."""
        created = self._event("created", response=self._head)
        return created + self._event("in_progress", response=self._head)

    def token(self, index: int, answer: SimAnswer, token: int, text: str, last: bool) -> bytes:
        """The event of one token; the first one has those of the item before it."""
        begin = b""
        if len(answer.tokens) == 1:
            begin = self._event("output_item.added", item=self._item(answer, ""))
            if not answer.function:
                begin += self._in_item(answer, "content_part.added", part=_part(""))
        kind = "function_call_arguments" if answer.function else "output_text"
        return begin + self._in_item(answer, f"{kind}.delta", delta=text)

    def closing(self, answers: Sequence[SimAnswer]) -> bytes:
        """The whole item, and the whole answer."""
        (answer,) = answers
        text, name = answer.text, answer.function
        if name:
            done = self._in_item(answer, "function_call_arguments.done", arguments=text, name=name)
        else:
            done = self._in_item(answer, "output_text.done", text=text)
            done += self._in_item(answer, "content_part.done", part=_part(text))
        done += self._event("output_item.done", item=self._item(answer, text))
        return done + self._event("completed", response=self._whole(answer))

    def _event(self, kind: str, **members: Any) -> bytes:
        self._events += 1
        place = {"sequence_number": self._events - 1, "output_index": 0}
        return _event(f"response.{kind}", **place, **members)

    def _in_item(self, answer: SimAnswer, kind: str, **members: Any) -> bytes:
        if not answer.function:
            members |= {"content_index": 0, "logprobs": []}
        return self._event(kind, item_id=self._item(answer, "")["id"], **members)

    def _item(self, answer: SimAnswer, text: str) -> Json:
        about = {"status": "completed" if text else "in_progress"}
        if answer.function:
            call = {"call_id": answer.call_id, "name": answer.function, "arguments": text}
            return {"id": f"fc_{self._id}", "type": "function_call", **about, **call}
        said = {"role": "assistant", "content": [_part(text)] if text else []}
        return {"id": f"msg_{self._id}", "type": "message", **about, **said}

    def _whole(self, answer: SimAnswer) -> Json:
        prompt, told = len(answer.request.prompt), len(answer.tokens)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": told,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + told,
        }
        whole = {"status": "completed", "output": [self._item(answer, answer.text)], "usage": usage}
        if answer.finish_reason == "length":
            whole |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return {**self._head, **whole}


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
