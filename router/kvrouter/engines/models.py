"""Which models the router serves, and the list of them that clients see."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvrouter.errors import ApiError, bad_request, endpoint_not_served, model_not_found

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from kvrouter.engines.engine import Engine, Identity


class ModelNames:
    """Which models there are, also while their engines are away.

    A synchronous state machine: what an engine serves is known from its joining on, and for
    `keep_s` after it has left, since it may only restart. What it no longer names while it is there
    (an adapter that was unloaded) it no longer serves.

    Args:
        only: the one model to serve, or None for whatever engines serve.
        keep_s: seconds; may change.
        clock: seconds, monotonic; injected by tests.
    """

    def __init__(
        self, only: str | None, keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.keep_s = keep_s
        self._only = only
        self._clock = clock
        self._here: dict[Engine, Identity] = {}
        self._left: dict[Engine, tuple[float, Identity]] = {}  # and when, the earliest first
        self._known: dict[str, list[Identity]] | None = None  # by model; None: to be made again

    def engine_joined(self, engine: Engine) -> None:
        """Learn its models; to be called again when they change."""
        if engine.identity is not None:
            self._left.pop(engine, None)
            self._here[engine] = engine.identity
            self._known = None

    def engine_left(self, engine: Engine) -> None:
        """Its models stay known for a while: until then a request for them is a 503, not a 404."""
        identity = self._here.pop(engine, None)
        if identity is not None:
            self._left[engine] = self._clock(), identity
            self._known = None

    @property
    def any(self) -> bool:
        """Whether any model is known."""
        return bool(self._models())

    def resolve(self, asked: str | None, path: str) -> str:
        """The model that a request for `path` means.

        Raises:
            ApiError: 404 where it is not known, 400 where none is named and there are several; 503
                where no model is known at all.
        """
        known = self._models()
        if asked is not None and asked in known:
            return asked
        if not known:
            raise ApiError(503, "No engine is available.", retry_after_s=1)
        if asked is not None:
            raise model_not_found(asked)
        serving = [model for model, identities in known.items() if _serve(identities, path)]
        if not serving:
            raise endpoint_not_served(path)
        if len(serving) > 1:
            raise bad_request("Name the `model`: several are served.", "model")
        return serving[0]

    def require(self, model: str, path: str) -> None:
        """Refuse a request that no engine of its model can serve.

        Raises:
            ApiError: 404: they do not have the endpoint `path`.
        """
        if not _serve(self._models().get(model, ()), path):
            raise endpoint_not_served(path, model)

    def _models(self) -> dict[str, list[Identity]]:
        """The models that are known, each with its engines' identities."""
        self._forget()
        if self._known is None:
            self._known = {self._only: []} if self._only else {}
            for identity in (*self._here.values(), *(one for _, one in self._left.values())):
                for model in identity.models:
                    self._known.setdefault(model, []).append(identity)
        return self._known

    def _forget(self) -> None:
        """Forget the engines that left too long ago."""
        while self._left:
            engine, (left_s, _) = next(iter(self._left.items()))
            if self._clock() - left_s < self.keep_s:
                return
            del self._left[engine]
            self._known = None


def _serve(identities: Collection[Identity], path: str) -> bool:
    """Whether engines serve `path`, as far as is known: True where there are none."""
    return not identities or any(identity.serves(path) for identity in identities)


def model_cards(engines: Iterable[Engine], created_s: int) -> dict[str, dict[str, object]]:
    """OpenAI's model objects by name: each model of an engine that is there, once.

    Args:
        engines: of the pool; those that have not joined are left out.
        created_s: Unix time that stands as `created`.
    """
    cards: dict[str, dict[str, object]] = {}
    for engine in engines:
        identity = engine.identity
        for name in identity.models if identity is not None else ():
            adapter = identity.adapter(name) if identity is not None else None
            cards.setdefault(
                name,
                {
                    "id": name,
                    "object": "model",
                    "created": created_s,
                    "owned_by": "kvrouter",
                    "root": adapter[1] if adapter else name,
                    "parent": identity.models[0] if adapter and identity else None,
                    "max_model_len": identity.max_model_len if identity else None,
                },
            )
    return cards
