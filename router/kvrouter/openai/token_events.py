"""The tokens of one streamed answer, across all engines that generate it. Pure: events in and out.

Knows completions and chats of one choice, whose events name their tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter.http.bounded_json import read_answer, read_event
from kvrouter.openai import sse

if TYPE_CHECKING:
    from kvrouter.openai.request import Kind

_HEAD: Final = ("id", "object", "created", "model")
_IDS: Final = "token_ids"
_PROMPT: Final = "prompt_token_ids"
_PLAIN: Final = frozenset({"role", "content"})
_SERVER_ERROR: Final = 500
_REASON_CHARACTERS: Final = 32
GIVEN_UP: Final = frozenset({"abort", "error", "cancelled"})
"""Finish reasons of requests that vLLM, SGLang or TensorRT-LLM gave up."""
_OTHER_TOKENS: Final = "it does not go on where the stream broke off"


class SentTokens:
    """What a client was sent of an answer; makes of each event what the client may see.

    Args:
        kind: of the request.
        show_ids: whether the client asked for the token ids itself.
        resumes: whether another engine goes on after one that ends with an error; else the client
            sees the error.
    """

    def __init__(
        self, kind: Kind = "completion", *, show_ids: bool = False, resumes: bool = True
    ) -> None:
        self._chat = kind == "chat"
        self._show_ids = show_ids
        self._resumes = resumes
        self.tokens: list[int] = []  # ids of all tokens of events that were sent
        # How many of them the text that was sent shows: another engine goes on after these. The
        # text of the others was held back, as of half a character.
        self.shown = 0
        self.earlier = 0  # how many tokens engines before the present one sent
        # JSON array of the prompt's token ids, if the first engine named them.
        self.prompt: bytes | None = None
        # The finish reason of the last event; None while there is none.
        self.finish: str | None = None
        self.known = True  # whether all of it was plain text, and every event named its tokens
        self.done = False  # whether the end mark was sent
        # Of the event that has nothing else, once it was sent.
        self.usage: dict[str, Any] | None = None
        # Why the present engine is to be left; None while all is well.
        self.failure: str | None = None
        # Data of the event by which an engine ended its stream; the client has not seen it.
        self.error: bytes | None = None
        self._unnamed = 0  # events with content that named no tokens
        self._head: dict[str, Any] = {}
        self._unshown: list[int] = []  # ids that wait for their text, if the client wants ids
        self._opened = False  # whether the client has seen a choice
        self._resumed = False
        self._expected_prompt: bytes | None = None  # that the present engine must confirm

    @property
    def generated(self) -> int:
        """Tokens that the client got: by usage, else those named, else one for each event."""
        counted = self.usage.get("completion_tokens") if isinstance(self.usage, dict) else None
        return counted if isinstance(counted, int) else len(self.tokens) + self._unnamed

    def resume(self, prompt: bytes | None = None) -> None:
        """Another engine goes on after the tokens that are shown.

        Args:
            prompt: JSON array of the token ids that it gets beside the messages of a chat: nothing
                that it sends counts before it has confirmed them.
        """
        del self.tokens[self.shown :]
        self._unshown = []  # they come again
        self.earlier = self.shown
        self.failure = self.error = None
        self._resumed = True
        self._expected_prompt = prompt

    def rewrite(self, events: bytes) -> bytes:
        """Whole events as the client may see them; those that it may not see are left out."""
        return sse.map_data(events, self._rewrite)

    def rewrite_answer(self, body: bytes) -> bytes:
        """An answer that came whole, as the client may see it."""
        try:
            answer = read_answer(body)
            (choice,) = answer["choices"]
            self.tokens += choice["token_ids"]
        except (ValueError, TypeError, KeyError):
            self.known = False
            return body
        if self._show_ids:
            return body
        for holder in (answer, choice):
            holder.update({name: None for name in (_IDS, _PROMPT) if name in holder})
        return orjson.dumps(answer)

    def missing_end(self, prompt_tokens: int | None) -> bytes:
        """The last events that an engine which broke off after its last token did not send.

        Args:
            prompt_tokens: for the usage; None if the client asked for none.
        """
        if self.done:
            return b""
        events = b""
        if prompt_tokens is not None and self.usage is None:
            sent = len(self.tokens)
            counts = {"prompt_tokens": prompt_tokens, "completion_tokens": sent}
            counts["total_tokens"] = prompt_tokens + sent
            events = sse.event(orjson.dumps({**self._head, "choices": [], "usage": counts}))
        return events + sse.DONE_EVENT

    def _rewrite(self, data: bytes) -> bytes | None:
        if self.failure is not None:
            return None
        if data == sse.DONE:
            self.done = True
            return data
        try:
            event = read_event(data)
            if "error" in event and self._fails(event["error"], data):
                return None
            return orjson.dumps(event) if self._take(event) else None
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            self.known = False  # an unknown event passes, and the stream is not resumed
            self._unnamed += 1
            return data

    def _fails(self, error: dict[str, Any], data: bytes) -> bool:
        """Whether this is the engine's own error, after which another may go on."""
        if not self._resumes or error["code"] < _SERVER_ERROR:
            return False
        self.failure, self.error = "its stream ends with an error", data
        return True

    def _take(self, event: dict[str, Any]) -> bool:
        """Make of an event what the client sees of it; whether it sees anything."""
        self._head = self._head or {name: event[name] for name in _HEAD if name in event}
        event.update(self._head)
        choices = event["choices"]
        for holder in (event, *choices):
            self._take_prompt(holder)
        seen = [self._take_choice(choice) for choice in choices]
        if self.failure is not None:
            return False
        usage = event.get("usage")
        if usage and self.earlier:
            self._correct(usage)
        if not choices:
            self.usage = usage or self.usage
            return True
        self._opened = self._opened or any(seen)
        return any(seen)

    def _take_prompt(self, holder: dict[str, Any]) -> None:
        ids = holder.get(_PROMPT)
        if ids is None:
            return
        if self._expected_prompt is not None and orjson.loads(self._expected_prompt) != ids:
            self.failure = _OTHER_TOKENS
        self._expected_prompt = None
        if not self._resumed:
            self.prompt = orjson.dumps(ids)
        if not self._show_ids or self._opened:
            del holder[_PROMPT]

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        """Take in a choice; whether the client sees it."""
        ids, reason, text = choice.get(_IDS), choice["finish_reason"], self._text(choice)
        if reason is not None and not isinstance(reason, str):
            raise TypeError("a finish reason that is no text")
        content = ids or reason or text
        if self._expected_prompt is not None and content:
            self.failure = _OTHER_TOKENS
        if self._resumes and reason in GIVEN_UP:
            self.failure = f"its stream ends with {reason!r}"
        if self.failure is not None:
            return False
        if self._chat:
            self._take_delta(choice["delta"])
        if ids is None:
            self.known = self.known and not text
            self._unnamed += self._has_content(choice)
        else:
            self.tokens += ids
        self._show_tokens(choice, ids or [], waits=not (text or reason))
        if text:
            self.shown = len(self.tokens)
        self.finish = reason[:_REASON_CHARACTERS] if reason else self.finish
        return bool(content) or not (self._resumed and self._opened)

    def _show_tokens(self, choice: dict[str, Any], ids: list[int], *, waits: bool) -> None:
        """Name tokens to a client that asked for them, once their text is there."""
        if not self._show_ids:
            choice.pop(_IDS, None)
            return
        self._unshown += ids
        if _IDS in choice or (self._unshown and not waits):
            choice[_IDS] = [] if waits else self._unshown
        if not waits:
            self._unshown = []

    def _text(self, choice: dict[str, Any]) -> str | None:
        text: str | None = choice["delta"].get("content") if self._chat else choice["text"]
        return text

    def _has_content(self, choice: dict[str, Any]) -> bool:
        """Whether there is text, reasoning or a tool call."""
        parts = choice["delta"] if self._chat else {"text": choice["text"]}
        return any(value for name, value in parts.items() if name != "role")

    def _take_delta(self, delta: dict[str, Any]) -> None:
        """Check that a chat's event has text alone; its role is sent once."""
        if self._resumed and self._opened:
            delta.pop("role", None)
        if any(value for name, value in delta.items() if name not in _PLAIN):
            self.known = False  # tokens do not show where in a tool call or in reasoning we are

    def _correct(self, usage: dict[str, Any]) -> None:
        """Count the tokens of earlier engines as completion, not as prompt."""
        usage["prompt_tokens"] -= self.earlier
        usage["completion_tokens"] += self.earlier
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
