"""The admin API: which engines there are, one more, one less. Knows no requests of clients.

Paths and words are those that users of sglang-router and vllm-router know (`/workers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import parse_qs, unquote

import msgspec
import orjson

from kvrouter.access.admin_token import TOKEN_NEEDED, shows_token
from kvrouter.engine import Engine, Role, parse_address
from kvrouter.errors import ApiError, bad_request
from kvrouter.kv_state import Reason
from kvstore.cross_origin import cross_origin_refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrouter.fleet import Fleet
    from kvrouter.http.exchange import Exchange
    from kvrouter.http.server import Handler
    from kvrouter.kv_ledger import EventLedger
    from kvrouter.pool import Pool
    from kvrouter.probe import Prober
    from kvrouter.replicas.changes import SharedFleet

PATH: Final = "/workers"
_ROLES: Final = {"prefill": Role.PREFILL, "decode": Role.DECODE, "regular": Role.BOTH}
_TYPES: Final = {role: name for name, role in _ROLES.items()}


class _Worker(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /workers."""

    url: str
    worker_type: Literal["prefill", "decode", "regular"] = "regular"


class Admin:
    """Answers GET, POST and DELETE of /workers.

    Args:
        pool: the engines.
        fleet: changes which there are.
        prober: says what is wrong with one.
        token: that each call must bring as `Authorization: Bearer`; "" for none.
        ledger: knows how well each engine's cache is known; None where no events are taken.
    """

    def __init__(
        self,
        pool: Pool,
        fleet: Fleet | SharedFleet,
        prober: Prober,
        token: str,
        ledger: EventLedger | None = None,
    ) -> None:
        self._pool = pool
        self._fleet = fleet
        self._prober = prober
        self._token = token
        self._ledger = ledger

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler of each call; a path that ends in "/" stands for all below."""
        calls: tuple[tuple[str, str, Callable[[Exchange], tuple[int, Any]]], ...] = (
            ("GET", PATH, self._list),
            ("POST", PATH, self._add),
            ("GET", f"{PATH}/", self._show),
            ("DELETE", f"{PATH}/", self._remove),
        )
        return [(method, path, self._guarded(call)) for method, path, call in calls]

    def _guarded(
        self, call: Callable[[Exchange], tuple[int, Any]]
    ) -> Callable[[Exchange], Awaitable[None]]:
        async def handle(exchange: Exchange) -> None:
            try:
                self._admit(exchange)
                status, answer = call(exchange)
            except ApiError as error:
                challenge = [("www-authenticate", "Bearer")] if error.status == 401 else []
                headers = (*error.headers(), *challenge)
                exchange.respond(error.status, error.body(), headers=headers)
            else:
                exchange.respond(status, orjson.dumps(answer))

        return handle

    def _admit(self, exchange: Exchange) -> None:
        if why := cross_origin_refusal(exchange.method, exchange.headers):
            raise ApiError(403, f"{why[0].upper()}{why[1:]}.")
        if self._token and not shows_token(exchange.headers.get("authorization", ""), self._token):
            raise ApiError(401, TOKEN_NEEDED)
        kind = exchange.headers.get("content-type", "").partition(";")[0].strip()
        if exchange.method == "POST" and kind != "application/json":
            # A page in a browser can post anything else to a port on this host unasked.
            raise ApiError(415, "Send the body as content-type: application/json.")

    def _list(self, exchange: Exchange) -> tuple[int, Any]:
        del exchange
        cards = [self._card(engine) for engine in self._pool.all()]
        counts = {
            f"{name}_count": sum(card["worker_type"] == name for card in cards) for name in _ROLES
        }
        return 200, {"workers": cards, "total": len(cards), "stats": counts}

    def _add(self, exchange: Exchange) -> tuple[int, Any]:
        try:
            wanted = msgspec.json.decode(exchange.body, type=_Worker)
        except (ValueError, RecursionError) as error:  # msgspec raises more than its own
            raise bad_request(
                f'The body must be {{"url": ..., "worker_type": ...}}: {error}.'
            ) from None
        try:
            address = parse_address(wanted.url)
        except ValueError as error:
            raise bad_request(f"{error}.", "url") from None
        return 202, self._card(self._fleet.add(address, _ROLES[wanted.worker_type]))

    def _show(self, exchange: Exchange) -> tuple[int, Any]:
        return 200, self._card(self._named(exchange))

    def _remove(self, exchange: Exchange) -> tuple[int, Any]:
        engine = self._named(exchange)
        if _flag(exchange.query, "force"):
            legs = self._fleet.cut(engine)
            return 200, {**self._card(engine), "removed": True, "cut": legs}
        gone = self._fleet.remove(engine)
        return (200 if gone else 202), {**self._card(engine), "removed": gone}

    def _named(self, exchange: Exchange) -> Engine:
        name = unquote(exchange.path[len(PATH) + 1 :])
        try:
            engine = self._pool.find(parse_address(name))
        except ValueError:
            engine = None
        if engine is None:
            raise ApiError(404, f"There is no worker {name[:200]!r}.")
        return engine

    def _card(self, engine: Engine) -> dict[str, Any]:
        identity = engine.identity
        up = identity is not None and not engine.draining
        state = self._pool.state(engine)
        passing = any(t.breaker is None or t.breaker.allows() for t in engine.targets)
        return {
            "id": engine.address,
            "url": engine.url,
            "worker_type": _TYPES[engine.role],
            "status": "draining" if engine.draining else "up" if up else "away",
            "is_healthy": up and passing,
            "circuit": state.value if state is not None else None,
            "load": engine.requests,
            "tokens": engine.tokens - engine.elsewhere,
            "index": self._index(engine) if not engine.ranks else None,
            "ranks": [self._rank(rank) for rank in engine.ranks],
            "models": list(identity.models) if identity is not None else [],
            "problem": self._prober.problem(engine),
        }

    def _rank(self, rank: Engine) -> dict[str, Any]:
        state = self._pool.state(rank)
        circuit = state.value if state is not None else None
        return {
            "id": rank.address,
            "circuit": circuit,
            "load": rank.requests,
            "tokens": rank.tokens - rank.elsewhere,
            "index": self._index(rank),
        }

    def _index(self, engine: Engine) -> dict[str, Any]:
        """How well its cache is known."""
        reason = self._ledger.standing(engine) if self._ledger else Reason.NO_EVENTS
        naming = self._ledger.naming(engine) if self._ledger else None
        return {"state": reason.state, "reason": reason, "naming": naming}


def _flag(query: str, name: str) -> bool:
    """The value of a flag in a query, the last where it is given more than once.

    Raises:
        ApiError: 400: it is none.
    """
    given = parse_qs(query, keep_blank_values=True).get(name, ["false"])[-1]
    if given not in ("true", "false"):
        raise bad_request(f"`{name}` must be true or false.", name)
    return given == "true"
