"""The JSON of a simulated engine, in the shapes of vLLM 0.32. Pure: values to bytes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import orjson

from kvrouter.openai import sse
from kvrouter.tools.sim.requests import GenerateRequest


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
