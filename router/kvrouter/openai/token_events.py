"""What a client was sent of one stream, over all engines that spoke. Pure: events in, events out.

Knows completions and chats of one choice, whose events name their tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter.openai import sse

if TYPE_CHECKING:
    from kvrouter.openai.request import Kind

_HEAD: Final = ("id", "object", "created", "model")
_IDS: Final = "token_ids"
_PROMPT: Final = "prompt_token_ids"
_PLAIN: Final = frozenset({"role", "content"})
_SERVER_ERROR: Final = 500
_REASON_CHARACTERS: Final = 32
_ASTRAY: Final = "it does not go on where the stream broke off"


class Spoken:
    """What a client was sent, and what it sees of what comes.

    Args:
        kind: of the request.
        show_ids: whether the client asked for the token ids itself.
        resumes: whether another engine goes on where one ends with an error; else the client sees
            the error.

    Attributes:
        tokens: ids of all tokens of events that were sent.
        certain: how many of them the text that was sent shows: after these another engine goes on.
            The text of those behind was held back, as of half a character.
        before: how many tokens engines before the one that speaks had said.
        prompt: JSON array of the prompt's token ids, as the first engine told; None where not.
        finish: the reason that the last event gave, None while there is none.
        told: whether all of it was plain text, and every event named its tokens.
        ended: whether the end mark was sent.
        usage: of the event that has nothing else, once it was sent.
        failure: why the engine that speaks is to be left; None while all is well.
        error: data of the event by which an engine ended its stream; the client has not seen it.
    """

    def __init__(
        self, kind: Kind = "completion", *, show_ids: bool = False, resumes: bool = True
    ) -> None:
        self._chat = kind == "chat"
        self._show_ids = show_ids
        self._resumes = resumes
        self.tokens: list[int] = []
        self.certain = 0
        self.before = 0
        self.prompt: bytes | None = None
        self.finish: str | None = None
        self.told = True
        self.ended = False
        self.usage: dict[str, Any] | None = None
        self.failure: str | None = None
        self.error: bytes | None = None
        self._unnamed = 0  # events that said something and named no tokens
        self._head: dict[str, Any] = {}
        self._untold: list[int] = []  # by who asked for ids: they wait for their text
        self._opened = False
        self._resumed = False
        self._awaited: bytes | None = None

    @property
    def generated(self) -> int:
        """Tokens that the client got: as usage tells, else those named, else one for each event."""
        told = self.usage.get("completion_tokens") if isinstance(self.usage, dict) else None
        return told if isinstance(told, int) else len(self.tokens) + self._unnamed

    def go_on(self, prompt: bytes | None = None) -> None:
        """Another engine speaks from now on, and begins after the certain tokens.

        Args:
            prompt: JSON array of the token ids that it is given beside the messages of a chat: it
                must say that it took them before anything it says is believed.
        """
        del self.tokens[self.certain :]
        self._untold = []  # they are said again
        self.before = self.certain
        self.failure = self.error = None
        self._resumed = True
        self._awaited = prompt

    def take(self, events: bytes) -> bytes:
        """Whole events as the client may see them; those that it may not are left out."""
        return sse.map_data(events, self._data)

    def whole(self, body: bytes) -> bytes:
        """Take in an answer that came whole; returns it as the client may see it."""
        try:
            answer = orjson.loads(body)
            (choice,) = answer["choices"]
            self.tokens += choice["token_ids"]
        except (ValueError, TypeError, KeyError):
            self.told = False
            return body
        if self._show_ids:
            return body
        for holder in (answer, choice):
            holder.update({name: None for name in (_IDS, _PROMPT) if name in holder})
        return orjson.dumps(answer)

    def ending(self, prompt_tokens: int | None) -> bytes:
        """What an engine that broke off after its last token still owed the client.

        Args:
            prompt_tokens: for the usage; None where the client asked for none.
        """
        if self.ended:
            return b""
        owed = b""
        if prompt_tokens is not None and self.usage is None:
            spoken = len(self.tokens)
            counts = {"prompt_tokens": prompt_tokens, "completion_tokens": spoken}
            counts["total_tokens"] = prompt_tokens + spoken
            owed = sse.event(orjson.dumps({**self._head, "choices": [], "usage": counts}))
        return owed + sse.DONE_EVENT

    def _data(self, data: bytes) -> bytes | None:
        if self.failure is not None:
            return None
        if data == sse.DONE:
            self.ended = True
            return data
        try:
            event = orjson.loads(data)
            if "error" in event and self._fails(event["error"], data):
                return None
            return orjson.dumps(event) if self._sees(event) else None
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            self.told = False  # nothing that we know: it passes, and the stream is not resumed
            self._unnamed += 1
            return data

    def _fails(self, error: dict[str, Any], data: bytes) -> bool:
        """Whether this is the engine's own error, after which another may go on."""
        if not self._resumes or error["code"] < _SERVER_ERROR:
            return False
        self.failure, self.error = "its stream ends with an error", data
        return True

    def _sees(self, event: dict[str, Any]) -> bool:
        """Make of an event what the client sees of it; whether it sees anything."""
        self._head = self._head or {name: event[name] for name in _HEAD if name in event}
        event.update(self._head)
        choices = event["choices"]
        for holder in (event, *choices):
            self._read_prompt(holder)
        shown = [self._says(choice) for choice in choices]
        if self.failure is not None:
            return False
        usage = event.get("usage")
        if usage and self.before:
            self._correct(usage)
        if not choices:
            self.usage = usage or self.usage
            return True
        self._opened = self._opened or any(shown)
        return any(shown)

    def _read_prompt(self, holder: dict[str, Any]) -> None:
        ids = holder.get(_PROMPT)
        if ids is None:
            return
        if self._awaited is not None and orjson.loads(self._awaited) != ids:
            self.failure = _ASTRAY
        self._awaited = None
        if not self._resumed:
            self.prompt = orjson.dumps(ids)
        if not self._show_ids or self._opened:
            del holder[_PROMPT]

    def _says(self, choice: dict[str, Any]) -> bool:
        """Take in what a choice says; whether the client sees it."""
        ids, reason = choice.get(_IDS), choice["finish_reason"]
        if reason is not None and not isinstance(reason, str):
            raise TypeError("a finish reason that is no text")
        said = ids or reason or self._text(choice)
        if self._awaited is not None and said:
            self.failure = _ASTRAY
        if self.failure is not None:
            return False
        if self._chat:
            self._plain(choice["delta"])
        text = self._text(choice)
        if ids is None:
            self.told = self.told and not text
            self._unnamed += self._speaks(choice)
        else:
            self.tokens += ids
        self._show_tokens(choice, ids or [], waits=not (text or reason))
        if text:
            self.certain = len(self.tokens)
        self.finish = reason[:_REASON_CHARACTERS] if reason else self.finish
        return bool(said) or not (self._resumed and self._opened)

    def _show_tokens(self, choice: dict[str, Any], ids: list[int], *, waits: bool) -> None:
        """Name tokens to who asked for them, when their text is there: else they may come again."""
        if not self._show_ids:
            choice.pop(_IDS, None)
            return
        self._untold += ids
        if _IDS in choice or (self._untold and not waits):
            choice[_IDS] = [] if waits else self._untold
        if not waits:
            self._untold = []

    def _text(self, choice: dict[str, Any]) -> str | None:
        text: str | None = choice["delta"].get("content") if self._chat else choice["text"]
        return text

    def _speaks(self, choice: dict[str, Any]) -> bool:
        """Whether something is said: text, reasoning or a tool call."""
        said = choice["delta"] if self._chat else {"text": choice["text"]}
        return any(value for name, value in said.items() if name != "role")

    def _plain(self, delta: dict[str, Any]) -> None:
        """Look whether a chat's event says text alone; its role is said once."""
        if self._resumed and self._opened:
            delta.pop("role", None)
        if any(value for name, value in delta.items() if name not in _PLAIN):
            self.told = False  # a tool call, or reasoning: no token tells where in it we are

    def _correct(self, usage: dict[str, Any]) -> None:
        """Count as said, not as prompt, what other engines had said."""
        usage["prompt_tokens"] -= self.before
        usage["completion_tokens"] += self.before
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
