"""The admin API: lists, adds and removes engines.

Paths and words (`/workers`) are those of sglang-router and vllm-router.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import parse_qs, unquote

import msgspec

from kvrouter.engines.engine import Engine, Role
from kvrouter.errors import ApiError, bad_request
from kvrouter.http.server.respond import HttpRequest, HttpResponse, as_json
from kvrouter.membership.fleet import MAX_ENGINES, FleetFull
from kvrouter.options.addresses import parse_address
from kvrouter.prefix.events.confidence import Reason
from kvrouter_store.connection.cross_origin import cross_origin_refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.access.setup import AdminToken
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.server.respond import Respond, Row
    from kvrouter.membership.fleet import Fleet
    from kvrouter.membership.prober import Prober
    from kvrouter.prefix.events.tracker import CacheTracker
    from kvrouter.replicas.changes import SharedFleet

PATH: Final = "/workers"
_ROLES: Final = {"prefill": Role.PREFILL, "decode": Role.DECODE, "regular": Role.BOTH}
_TYPES: Final = {role: name for name, role in _ROLES.items()}


class _Worker(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /workers."""

    url: str
    worker_type: Literal["prefill", "decode", "regular"] = "regular"


@dataclass(eq=False, repr=False)
class Admin:
    """Answers GET, POST and DELETE of /workers; requires `token`."""

    pool: EnginePool
    fleet: Fleet | SharedFleet
    prober: Prober
    token: AdminToken
    tracker: CacheTracker | None = None

    def rows(self, *, changes: bool = True) -> list[Row]:
        """The endpoints, those that change engines only with `changes`."""
        calls = [("GET", PATH, self._list), ("GET", f"{PATH}/", self._show)]
        if changes:
            calls += [("POST", PATH, self._add), ("DELETE", f"{PATH}/", self._remove)]
        return [(method, path, partial(self._admitted, call)) for method, path, call in calls]

    def _admitted(self, call: Respond, request: HttpRequest) -> HttpResponse:
        if why := cross_origin_refusal(request.method, request.headers):
            raise ApiError(403, f"{why[0].upper()}{why[1:]}.")
        self.token.ask(request.headers)
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if request.method == "POST" and kind != "application/json":
            # A web page could post any other type to a port of this host without a preflight.
            raise ApiError(415, "Send the body as content-type: application/json.")
        if "content-encoding" in request.headers:
            raise ApiError(415, "Send the body without a Content-Encoding.")
        return call(request)

    def _list(self, _: HttpRequest) -> HttpResponse:
        cards = [self._card(engine) for engine in self.pool.all()]
        counts = {
            f"{name}_count": sum(card["worker_type"] == name for card in cards) for name in _ROLES
        }
        return as_json(200, {"workers": cards, "total": len(cards), "stats": counts})

    def _add(self, request: HttpRequest) -> HttpResponse:
        try:
            wanted = msgspec.json.decode(request.body, type=_Worker)
        except (ValueError, RecursionError) as error:
            raise bad_request(
                f'The body must be {{"url": ..., "worker_type": ...}}: {error}.'
            ) from None
        try:
            address = parse_address(wanted.url)
        except ValueError as error:
            raise bad_request(f"{error}.", "url") from None
        try:
            engine = self.fleet.add(address, _ROLES[wanted.worker_type])
        except FleetFull:
            full = f"There are {MAX_ENGINES} workers, which is the most; remove one first."
            raise ApiError(409, full) from None
        at = (("location", f"{PATH}/{engine.address}"),)
        return as_json(202, self._card(engine), at)

    def _show(self, request: HttpRequest) -> HttpResponse:
        return as_json(200, self._card(self._named(request)))

    def _remove(self, request: HttpRequest) -> HttpResponse:
        engine = self._named(request)
        if _flag(request.query, "force"):
            legs = self.fleet.cut(engine)
            return as_json(200, {**self._card(engine), "removed": True, "cut": legs})
        gone = self.fleet.remove(engine)
        return as_json(200 if gone else 202, {**self._card(engine), "removed": gone})

    def _named(self, request: HttpRequest) -> Engine:
        name = unquote(request.path[len(PATH) + 1 :])
        try:
            engine = self.pool.find(parse_address(name))
        except ValueError:
            engine = None
        if engine is None:
            raise ApiError(404, f"There is no worker {name[:200]!r}.")
        return engine

    def _card(self, engine: Engine) -> dict[str, Any]:
        return worker_card(engine, self.pool, self.prober.problem(engine), self._index)

    def _index(self, engine: Engine) -> dict[str, Any]:
        """How well the router knows its cache."""
        reason = self.tracker.confidence(engine) if self.tracker else Reason.NO_EVENTS
        naming = self.tracker.naming(engine) if self.tracker else None
        return {"state": reason.state, "reason": reason, "naming": naming}


def worker_card(
    engine: Engine, pool: EnginePool, problem: str | None, index: Callable[[Engine], Any]
) -> dict[str, Any]:
    """An engine in JSON; `index` tells how well the router knows a cache."""
    identity = engine.identity
    up = identity is not None and not engine.draining
    passing = any(t.breaker is None or t.breaker.allows() for t in engine.targets)
    return {
        "id": engine.address,
        "worker_id": engine.address,  # the same to clients of sglang-router and smg
        "url": engine.url,
        "worker_type": _TYPES[engine.role],
        "status": "draining" if engine.draining else "up" if up else "away",
        "is_healthy": up and passing,
        **_load(engine, pool),
        "index": index(engine) if not engine.ranks else None,
        "ranks": [
            {"id": rank.address, **_load(rank, pool), "index": index(rank)} for rank in engine.ranks
        ],
        "models": list(identity.models) if identity is not None else [],
        "problem": problem,
    }


def _load(engine: Engine, pool: EnginePool) -> dict[str, Any]:
    return {
        "circuit": pool.state(engine),
        "load": engine.requests,
        "tokens": engine.tokens - engine.remote_tokens,
    }


def _flag(query: str, name: str) -> bool:
    """The value of a flag in a query; the last one counts.

    ApiError: 400: it is neither true nor false.
    """
    given = parse_qs(query, keep_blank_values=True).get(name, ["false"])[-1]
    if given not in ("true", "false"):
        raise bad_request(f"`{name}` must be true or false.", name)
    return given == "true"
