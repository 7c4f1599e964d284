"""What the clients of drills ask, with the right answers."""

import random
from dataclasses import dataclass
from typing import Any, Protocol

from tests.chaos.cluster import BLOCK_TOKENS, KV_BYTES_PER_TOKEN, MODEL

from kvrouter.tools.sim.kv_bytes import Oracle
from kvrouter.tools.sim.settings import SimSettings

_WORDS = ("river", "machine", "seldom", "carries", "a", "letter", "to", "the", "quiet", "harbour")


@dataclass(frozen=True)
class Request:
    """A request, and the text of its whole answer.

    Attributes:
        resumable: whether its stream could go on at another engine.
    """

    body: dict[str, Any]
    expected: str
    resumable: bool = True


class Requests(Protocol):
    """A source of requests."""

    def next(self) -> Request:
        """Another one."""


def oracle() -> Oracle:
    """The right answers of the drills' engines."""
    sim = SimSettings(model=MODEL, block_size=BLOCK_TOKENS, kv_bytes_per_token=KV_BYTES_PER_TOKEN)
    return Oracle(sim.manifest)


class MixedRequests:
    """Mostly streams, some of them long; every third prompt repeats a prefix."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._prompts: list[list[int]] = [[1]]
        self._oracle = oracle()

    def next(self) -> Request:
        """Another one."""
        draw = self._draw
        stream = draw.random() < 0.7
        tokens = draw.randint(200, 500) if stream and draw.random() < 0.2 else draw.randint(8, 64)
        ids, prompt = self._prompt()
        body = {"model": MODEL, "max_tokens": tokens, "stream": stream, **prompt, "temperature": 0}
        kind = draw.random()
        if kind >= 0.9:
            body["frequency_penalty"] = 0.5
        elif kind >= 0.8:  # drawn at random; simulated engines say the same
            body["temperature"] = 0.7
        return Request(body, self._oracle.text(ids, tokens), resumable=kind < 0.9)

    def _prompt(self) -> tuple[list[int], dict[str, Any]]:
        """Token ids of a prompt, and its form: as ids, as a text or as a chat."""
        draw = self._draw
        if draw.random() < 0.4:
            text = " ".join(draw.choice(_WORDS) for _ in range(draw.randint(20, 120)))
            if draw.random() < 0.5:
                return self._oracle.tokenizer.encode(text), {"prompt": text}
            messages = [{"role": "user", "content": text}]
            ids = self._oracle.tokenizer.render_chat(
                messages, add_generation_prompt=True, continue_final_message=False
            )
            return ids, {"messages": messages}
        begin = draw.choice(self._prompts[-50:]) if draw.random() < 0.4 else []
        ids = begin[: draw.randrange(300)]
        ids = ids + [draw.randrange(50_000) for _ in range(draw.randint(5, 200))]
        self._prompts.append(ids)
        return ids, {"prompt": ids}


class SharedPrefixes:
    """Prompts of a few long prefixes, of which now and then a new one takes the oldest's place.

    Most answers are streams, and some are long. Each stream could go on at another engine.
    """

    PREFIXES = 96
    PREFIX_TOKENS = 20 * BLOCK_TOKENS

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._prefixes = [self._ids(self.PREFIX_TOKENS) for _ in range(self.PREFIXES)]
        self._oracle = oracle()

    def next(self) -> Request:
        """Another one."""
        draw = self._draw
        if draw.random() < 0.05:
            self._prefixes = [*self._prefixes[1:], self._ids(self.PREFIX_TOKENS)]
        ids = draw.choice(self._prefixes) + self._ids(draw.randint(2, 40))
        stream = draw.random() < 0.7
        tokens = draw.randint(100, 300) if stream and draw.random() < 0.1 else draw.randint(4, 32)
        body = {"model": MODEL, "prompt": ids, "max_tokens": tokens, "stream": stream}
        return Request({**body, "temperature": 0}, self._oracle.text(ids, tokens))

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(50_000) for _ in range(count)]
