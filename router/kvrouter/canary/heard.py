"""Listens to the answer of a sampled request as it passes, and keeps its tokens.

The engine names them since the router asked it to; a client that did not ask sees none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter.outlet import Direct
from kvrouter.relay import Relay
from kvrouter.tidy import tidy_events

if TYPE_CHECKING:
    from kvrouter.http.client import Answer
    from kvrouter.leg import Legs
    from kvrouter.metrics import Metrics
    from kvrouter.passage import Passage

NAMED: Final = ("token_ids", "prompt_token_ids")
"""Members by which engines name tokens."""


class Heard:
    """The tokens of one answer.

    Args:
        show_ids: whether the client asked for token ids itself.

    Attributes:
        tokens: ids, as far as they were heard.
        told: whether everything that was said named its tokens.
    """

    def __init__(self, *, show_ids: bool) -> None:
        self._show_ids = show_ids
        self.tokens: list[int] = []
        self.told = True

    def events(self, events: bytes) -> bytes:
        """Take in whole events of a stream; returns them as the client may see them."""
        lines = events.split(b"\n")
        return b"\n".join(
            self._event(line) if line.startswith(b"data: {") else line for line in lines
        )

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
            holder.update({name: None for name in NAMED if name in holder})
        return orjson.dumps(answer)

    def _event(self, line: bytes) -> bytes:
        try:
            event = orjson.loads(line[6:])
            for choice in event["choices"]:
                self._says(choice)
        except (ValueError, TypeError, KeyError, AttributeError):
            self.told = False  # an error event, or nothing that we know: it passes as it is
            return line
        if self._show_ids:
            return line
        for holder in (event, *event["choices"]):
            for name in NAMED:
                holder.pop(name, None)
        return b"data: " + orjson.dumps(event)

    def _says(self, choice: dict[str, Any]) -> None:
        ids = choice.get("token_ids")
        said = choice.get("text") or (choice.get("delta") or {}).get("content")
        if ids:
            self.tokens += ids
        elif said:
            self.told = False


class Listening(Direct):
    """The outlet of a sampled request: as `Direct`, and it hears what passes."""

    def __init__(self, legs: Legs, metrics: Metrics, heard: Heard) -> None:
        super().__init__(legs, metrics)
        self._heard = heard

    def whole(self, passage: Passage, body: bytes) -> None:
        """Answer, without the tokens' names where the client did not ask for them."""
        super().whole(passage, self._heard.whole(body))

    def relay(self, passage: Passage, answer: Answer) -> Relay:
        """As `Direct.relay`, after every event was heard."""
        heard, cached = self._heard, passage.cached_tokens

        def tidy(events: bytes) -> bytes:
            return tidy_events(heard.events(events), cached)

        return Relay(passage.exchange, answer, self._metrics.gaps.buckets, tidy, every=True)
