"""OpenAI's completion request as this engine takes it, and the JSON of its answers. Pure."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from .generation import Generated, GenerateRequest

NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("n", "best_of", "top_p", "repetition_penalty"), (None, 1)),
    **dict.fromkeys(("echo", "use_beam_search"), (None, False)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_tokens"), (None, 0)),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "logit_bias", "suffix"), (None, "")),
    **dict.fromkeys(("stop", "stop_token_ids", "bad_words"), (None, [], "")),
    "top_k": (None, 0, -1),
}
"""Parameters that would change the answer, and the values that do not."""


class BadRequest(ValueError):
    """The request cannot be answered: a status of 400, and why."""


@dataclass(frozen=True)
class CompletionRequest:
    """A request, with what its answer is to look like."""

    model: str
    generate: GenerateRequest
    stream: bool
    include_usage: bool
    token_ids: bool

    @classmethod
    def read(
        cls,
        body: Any,
        encode: Callable[[str], list[int]],
        max_model_len: int,
        vocabulary: int,
    ) -> "CompletionRequest":
        """The request in a body. Raises BadRequest."""
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        for name, neutral in NEUTRAL.items():
            if body.get(name) not in neutral:
                raise BadRequest(f"this engine does not support {name}")
        prompt = _prompt(body.get("prompt"), encode, vocabulary)
        most = 16 if body.get("max_tokens") is None else body["max_tokens"]
        if not isinstance(most, int) or most < 1 or len(prompt) + most > max_model_len:
            raise BadRequest(
                f"max_tokens must be from 1 on, and at most {max_model_len} with the prompt's "
                f"{len(prompt)} tokens; got {most!r}"
            )
        try:
            generate = GenerateRequest(
                prompt,
                most,
                float(1.0 if body.get("temperature") is None else body["temperature"]),
                None if body.get("seed") is None else int(body["seed"]) % (1 << 63),
                body.get("ignore_eos") is True,
                None if body.get("cache_salt") is None else str(body["cache_salt"]),
            )
            usage = (body.get("stream_options") or {}).get("include_usage") is True
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise BadRequest(str(error)) from None
        if not 0 <= generate.temperature < float("inf"):
            raise BadRequest("temperature must be at least 0")
        flags = body.get("stream") is True, usage, body.get("return_token_ids") is True
        return cls(str(body.get("model")), generate, *flags)


def _prompt(given: Any, encode: Callable[[str], list[int]], vocabulary: int) -> list[int]:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], list | str):
        given = given[0]
    if isinstance(given, str):
        given = encode(given)
    if not isinstance(given, list) or not given or any(type(each) is not int for each in given):
        raise BadRequest("prompt must be one text or one list of token ids, and not empty")
    if not all(0 <= each < vocabulary for each in given):
        raise BadRequest(f"the model has token ids from 0 to {vocabulary - 1}")
    return given


class Answers:
    """The JSON of one request's answer, whole or by events."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._head = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }
        self._first = True

    def whole(self, answer: Generated, text: str) -> Mapping[str, Any]:
        """The answer of a request without `stream`."""
        choice = self._choice(text, answer.tokens, answer.finish_reason)
        return {
            **self._head,
            "choices": [choice],
            "usage": self._usage(answer),
            "kv_transfer_params": answer.transfer,
        }

    def token(self, token: int, text: str) -> Mapping[str, Any]:
        """The event of one token."""
        return {**self._head, "choices": [self._choice(text, [token], None)]}

    def closing(self, answer: Generated, text: str) -> list[Mapping[str, Any]]:
        """The events after the last token; `text` is what was held back."""
        ended = {**self._head, "choices": [self._choice(text, [], answer.finish_reason)]}
        usage = {**self._head, "choices": [], "usage": self._usage(answer)}
        return [ended, usage] if self._request.include_usage else [ended]

    def _choice(self, text: str, tokens: list[int], reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None}
        choice["finish_reason"] = reason
        if self._request.token_ids:
            choice["token_ids"] = tokens
            if self._first:
                choice["prompt_token_ids"] = self._request.generate.prompt
        self._first = False
        return choice

    def _usage(self, answer: Generated) -> dict[str, Any]:
        prompt, completion = len(self._request.generate.prompt), len(answer.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        }
