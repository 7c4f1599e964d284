"""Which models the router serves, and the list of them that clients see."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.errors import ApiError, bad_request, endpoint_not_served, model_not_found
from kvrouter.openai.endpoints import KNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvrouter.engines.model_settings import Aliases

    Found = tuple[Engine, Identity]


@dataclass(eq=False)
class ModelNames:
    """The known models: those of engines in the pool, and for `keep_s` those of engines that left.

    An engine that left may only restart. A model that an engine in the pool no longer names (an
    adapter that was unloaded) is forgotten at once. A synchronous state machine.
    """

    only: str | None  # the one model to serve; None: every model of the engines
    keep_s: float  # seconds; may change
    clock: Callable[[], float] = time.monotonic  # seconds, monotonic
    aliases: Aliases = field(default_factory=dict)  # other names, always known; may change

    def __post_init__(self) -> None:
        self._here: dict[Engine, Identity] = {}
        self._left: dict[Engine, tuple[float, Identity]] = {}  # and when, the earliest first
        self._known: dict[str, list[Found]] | None = None  # by model; None: to be rebuilt

    def engine_joined(self, engine: Engine) -> None:
        """Learn the models of `engine`; to be called again when they change."""
        if engine.identity is not None:
            self._left.pop(engine, None)
            self._here[engine] = engine.identity
            self._known = None

    def engine_left(self, engine: Engine) -> None:
        """Keep its models for a while: until then a request for them gets 503, not 404."""
        identity = self._here.pop(engine, None)
        if identity is not None:
            self._left[engine] = self.clock(), identity
            self._known = None

    @property
    def any(self) -> bool:
        """Whether any model is known."""
        return bool(self._models())

    def resolve(self, asked: str | None, path: str) -> str:
        """The model or alias that a request for `path` means.

        One that names none means what engines take it for: the first model of each, if that is the
        same at all; the others are further names and adapters.

        ApiError: 404: it is unknown. 400: the request names none, and there are several. 503: no
        model is known at all.
        """
        known = self._models()
        if asked is not None and (asked in known or asked in self.aliases):
            return asked
        if not known:
            raise _no_engine()
        if asked is not None:
            raise model_not_found(asked)
        serving = [model for model, found in known.items() if _serve(found, path)]
        if not serving:
            raise endpoint_not_served(path, ())
        first = {identity.models[0] for model in serving for _, identity in known[model]}
        if len(serving) > 1 and len(first) > 1:
            raise bad_request("Name the `model`: several are served.", "model")
        return serving[0] if len(serving) == 1 else first.pop()

    def meant(self, asked: str | None, path: str) -> str:
        """The model as far as is known by now, for counts; else "": such as of an alias."""
        try:
            name = self.resolve(asked, path)
        except ApiError:
            return ""
        versions = self.aliases.get(name, (name,))
        return next(iter(versions)) if len(versions) == 1 else ""

    def require(self, model: str, path: str) -> None:
        """ApiError 404, if no engine of a model or alias has the endpoint `path`; 503: none is."""
        known, versions = self._models(), self.aliases.get(model)
        found: Sequence[Found] = known.get(model, ())
        if versions is not None:
            found = [one for each in versions for one in known.get(each, ())]
        if not found and path not in KNOWN:
            raise _no_engine()
        if not _serve(found, path):
            raise endpoint_not_served(path, _offered(found), model)

    def _models(self) -> dict[str, list[Found]]:
        """The known models, each with its engines and what they are."""
        self._forget()
        if self._known is None:
            self._known = {self.only: []} if self.only else {}
            left = ((engine, identity) for engine, (_, identity) in self._left.items())
            for engine, identity in (*self._here.items(), *left):
                for model in identity.models:
                    self._known.setdefault(model, []).append((engine, identity))
        return self._known

    def _forget(self) -> None:
        """Forget the engines that left too long ago."""
        while self._left:
            engine, (left_s, _) = next(iter(self._left.items()))
            if self.clock() - left_s < self.keep_s:
                return
            del self._left[engine]
            self._known = None


def _no_engine() -> ApiError:
    return ApiError(503, "No engine is available.", retry_after_s=1)


def _offered(found: Iterable[Found]) -> list[str]:
    """The endpoints that decode engines list, in order."""
    serving = (identity for engine, identity in found if engine.role.serves(Role.DECODE))
    return sorted({path for identity in serving for path in identity.endpoints or ()})


def _serve(found: Iterable[Found], path: str) -> bool:
    """Whether decode engines serve `path`, as far as is known: True if there are none."""
    known = False
    for engine, identity in found:
        if engine.role.serves(Role.DECODE):
            known = True
            if identity.serves(path):
                return True
    return not known


def model_cards(
    engines: Iterable[Engine], created_s: int, aliases: Aliases
) -> dict[str, dict[str, Any]]:
    """OpenAI's model objects by name: each model of a joined engine once, and its aliases."""
    cards: dict[str, dict[str, Any]] = {}
    for identity in (e.identity for e in engines if e.identity is not None):
        for name in identity.models:
            adapter = identity.adapter(name)
            card = {
                "id": name,
                "object": "model",
                "created": created_s,
                "owned_by": "kvrouter",
                "root": adapter[1] if adapter else name,
                "parent": identity.models[0] if adapter else None,
                "max_model_len": identity.max_model_len,
            }
            cards.setdefault(name, card)
    return cards | _alias_cards(cards, aliases)


def _alias_cards(cards: dict[str, dict[str, Any]], aliases: Aliases) -> dict[str, dict[str, Any]]:
    """The aliases of models that have a card; `root` is the one of most weight."""
    found = {}
    for alias, versions in aliases.items():
        here = [model for model in versions if model in cards]
        if here:
            root = max(here, key=versions.__getitem__)
            lengths = [cards[model]["max_model_len"] for model in here]
            least = min((length for length in lengths if length is not None), default=None)
            own = {"id": alias, "root": root, "parent": None, "max_model_len": least}
            found[alias] = cards[root] | own
    return found
