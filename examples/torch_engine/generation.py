"""Computes one request: loads what the store has of its prompt, computes the rest, and goes on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrouter_store.tensors.client import LayerwisePut

from .kv_cache import CacheMemory, SequenceCache
from .model import Model
from .settings import EngineSettings
from .sharing import SharedPrompt, Sharing

BeginPut = Callable[[int, int], LayerwisePut | None]
"""Begins to put the tokens from the first on, so many; None where they are not shared."""


@dataclass(frozen=True)
class GenerateRequest:
    """What is asked for. temperature 0 takes the likeliest token, others draw."""

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None


@dataclass
class Generated:
    """An answer, whole or as far as it has come. transfer: what the router is told."""

    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str = "length"
    transfer: dict[str, Any] | None = None


class Engine:
    """A model with its cache and its link to the store. For one thread at a time; close() it."""

    def __init__(self, settings: EngineSettings, model: Model) -> None:
        self.settings = settings
        self.model = model
        self._memory = CacheMemory(settings, model)
        self.sharing: Sharing | None = None
        if settings.store:
            name = Path(settings.model).name
            self.sharing = Sharing(settings, self._memory.layers(), name, model.revision)

    def generate(
        self, request: GenerateRequest, go_on: Callable[[int], bool] = lambda token: True
    ) -> Generated:
        """The answer; `go_on` gets each token, and says whether more are wanted."""
        answer = Generated()
        tokens = len(request.prompt) + request.max_tokens
        with self._memory.sequence(tokens) as cache:
            if self.sharing is None:
                logits = self._prefill(request.prompt, cache, lambda first, tokens: None)
                self._decode(request, logits, cache, answer, go_on)
                return answer
            names = self.sharing.names(request.prompt, request.cache_salt)
            with SharedPrompt(self.sharing, names, cache) as shared:
                # One token is always computed: its logits begin the answer.
                answer.cached_tokens = cache.length = shared.load(len(request.prompt) - 1)
                logits = self._prefill(request.prompt, cache, shared.begin)
                self._decode(request, logits, cache, answer, go_on)
                answer.transfer = self.sharing.report(shared.stored())
        return answer

    def close(self) -> None:
        """End the link to the store."""
        if self.sharing is not None:
            self.sharing.close()

    def _prefill(self, prompt: Sequence[int], cache: SequenceCache, begin: BeginPut) -> Tensor:
        """Compute what the cache lacks of the prompt, chunk by chunk; the logits after it."""
        logits = torch.empty(0)
        step = self.settings.chunk_tokens
        for first in range(cache.length, len(prompt), step):
            chunk = prompt[first : first + step]
            put = begin(first, len(chunk))
            logits = self.model.forward(chunk, cache, put.layer if put is not None else None)
            cache.length += len(chunk)
        return logits

    def _decode(
        self,
        request: GenerateRequest,
        logits: Tensor,
        cache: SequenceCache,
        answer: Generated,
        go_on: Callable[[int], bool],
    ) -> None:
        """Compute the answer token by token."""
        draws = torch.Generator(logits.device)
        if request.seed is not None:
            draws.manual_seed(request.seed)
        elif request.temperature:
            draws.seed()
        while True:
            token = _next(logits, request.temperature, draws)
            answer.tokens.append(token)
            if not request.ignore_eos and token in self.model.end_tokens:
                answer.finish_reason = "stop"
            ended = answer.finish_reason == "stop" or len(answer.tokens) >= request.max_tokens
            if not go_on(token) or ended:
                return
            logits = self.model.forward([token], cache)
            cache.length += 1


def _next(logits: Tensor, temperature: float, draws: torch.Generator) -> int:
    if temperature < 1e-5:
        return int(logits.argmax())
    likely = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(likely, 1, generator=draws))
