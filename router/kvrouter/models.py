"""Which models the router serves, and the list of them that clients see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.errors import ApiError, bad_request, model_not_found

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrouter.engine import Engine


class ModelNames:
    """Which models there are, also while their engines are away. A watcher of the pool.

    Args:
        only: the one model to serve, or None for whatever engines serve.
    """

    def __init__(self, only: str | None) -> None:
        self._only = only
        self._known: dict[str, None] = {only: None} if only else {}

    def engine_joined(self, engine: Engine) -> None:
        """Remember its models."""
        if engine.identity is not None and self._only is None:
            self._known.update(dict.fromkeys(engine.identity.models))

    def engine_left(self, engine: Engine) -> None:
        """Its models stay known: a request for them is a 503, not a 404."""

    @property
    def any(self) -> bool:
        """Whether any model is known yet."""
        return bool(self._known)

    def resolve(self, asked: str | None) -> str:
        """The model that a request means.

        Raises:
            ApiError: 404 where it is not served, 400 where none is named and there are several.
        """
        if asked is not None and asked in self._known:
            return asked
        if not self._known:
            raise ApiError(503, "No engine is available.", retry_after_s=1)
        if asked is not None:
            raise model_not_found(asked)
        if len(self._known) > 1:
            raise bad_request("Name the `model`: several are served.", "model")
        return next(iter(self._known))


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
