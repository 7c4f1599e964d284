"""The JSON that a simulated engine answers, in the shapes of vLLM 0.32. Pure: values to bytes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import orjson

from kvrouter.sim.failures import Failure
from kvrouter.sim.requests import GenerateRequest, RequestError

__all__ = ["DONE", "Answer", "StreamWriter", "error_body", "models_body"]

DONE = b"data: [DONE]\n\n"


def error_body(error: RequestError | Failure, status: int) -> bytes:
    """OpenAI's error object, with the status as `code`."""
    message = error.message if isinstance(error, Failure) else str(error)
    inner = {"message": message, "type": error.type, "param": error.param, "code": status}
    return orjson.dumps({"error": inner})


def models_body(names: Sequence[str], root: str, max_model_len: int, created: int) -> bytes:
    """The answer of /v1/models."""
    cards = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": root,
            "parent": None,
            "max_model_len": max_model_len,
        }
        for name in names
    ]
    return orjson.dumps({"object": "list", "data": cards})


@dataclass
class Answer:
    """What an engine produced for one request."""

    request: GenerateRequest
    cached_tokens: int
    kv_transfer_params: dict[str, Any] | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    name: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """The answer's id, as vLLM prefixes it."""
        return ("cmpl-" if self.request.kind == "completion" else "chatcmpl-") + self.name

    def usage(self, details: bool = True) -> dict[str, Any]:
        """The usage so far."""
        prompt, completion = len(self.request.prompt), len(self.tokens)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }
        if details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage

    def body(self) -> bytes:
        """The whole answer of a request that does not stream."""
        chat = self.request.kind == "chat"
        asked = self.request.return_token_ids
        choice: dict[str, Any] = {"index": 0}
        if chat:
            choice["message"] = {"role": "assistant", "content": self.text}
        else:
            choice["text"] = self.text
        choice |= {
            "logprobs": None,
            "finish_reason": self.finish_reason,
            "stop_reason": None,
            "token_ids": self.tokens if asked else None,
        }
        if not chat:
            choice["prompt_token_ids"] = self.request.prompt if asked else None
        whole: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": self.request.model,
            "choices": [choice],
            "usage": self.usage(),
            "kv_transfer_params": self.kv_transfer_params,
        }
        if chat:
            whole["prompt_token_ids"] = self.request.prompt if asked else None
        return orjson.dumps(whole)


class StreamWriter:
    """Server-sent events of one answer: what `text/event-stream` carries, piece by piece."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        request = answer.request
        self._chat = request.kind == "chat"
        self._told_prompt = not request.return_token_ids
        self._head: dict[str, Any] = {
            "id": answer.id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": answer.created,
            "model": request.model,
        }

    def opening(self) -> bytes:
        """What comes before the first token: the role in a chat, nothing in a completion."""
        if not self._chat:
            return b""
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._event(choice)

    def token(self, token: int, text: str, last: bool) -> bytes:
        """One token; with the last one the reason why it ended."""
        reason = self._answer.finish_reason if last else None
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": reason, "stop_reason": None}
        if self._answer.request.return_token_ids:
            choice["token_ids"] = [token]
        return self._event(choice)

    def closing(self) -> bytes:
        """The usage, where it was asked for, and the end mark."""
        if not self._answer.request.include_usage:
            return DONE
        whole = {**self._head, "choices": [], "usage": self._answer.usage()}
        return b"data: " + orjson.dumps(whole) + b"\n\n" + DONE

    def _event(self, choice: dict[str, Any]) -> bytes:
        whole: dict[str, Any] = {**self._head, "choices": [choice]}
        if not self._told_prompt:
            self._told_prompt = True
            target = whole if self._chat else choice
            target["prompt_token_ids"] = self._answer.request.prompt
        if self._answer.request.continuous_usage:
            whole["usage"] = self._answer.usage(details=False)
        return b"data: " + orjson.dumps(whole) + b"\n\n"
