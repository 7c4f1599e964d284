"""Requests that are no legs: of a client on one engine, and a page that all engines have."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

import orjson

from kvrouter.engines.engine import Engine, Role
from kvrouter.errors import endpoint_not_served
from kvrouter.http.bounded_json import bounded
from kvrouter.http.client.pool import EngineResponse, UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.openai.endpoints import LOAD
from kvrouter.serving.legs.engine_client import EngineClient, check_plain
from kvrouter.serving.legs.failures import failure_of

if TYPE_CHECKING:
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.server.exchange import Exchange

    Sent = tuple[str, bytes, bytes]
    """Path, header lines and body."""


async def forward(
    client: EngineClient, engine: Engine, sent: Sent, *, as_it_is: bool = False, once: bool = False
) -> EngineResponse:
    """The engine's answer to a request that is no leg, also if the engine refuses it.

    With `as_it_is` an answer of any status: it says nothing about the engine. `once`: the request
    is never sent again, as the engine may have begun with it.

    The caller must take the answer to its end or close it, and report success to the pool.

    Raises:
        LegFailed: no answer came, or one that is about the engine and not about the request.
    """
    try:
        answer = await client.send(engine, *sent, client.deadlines, once=once)
        if answer.status == 200:
            check_plain(answer)
    except UpstreamError as error:
        raise client.failed(engine, error) from None
    ours = client.worker_keys.judged(engine.server.address, answer.status)
    failure = failure_of(answer.status, is_json=True, ours=ours)
    if as_it_is or answer.status < 400 or failure is Failure.REQUEST:
        return answer
    raise await client.not_well(engine, Role.DECODE, answer)


@dataclass(eq=False, slots=True)
class FleetLoad:
    """Answers /load with the sum of what engines say there, whatever their role and model.

    vLLM's is the number of its requests, 0 without --enable-server-load-tracking
    (entrypoints/serve/instrumentator/basic.py). Engines that do not say it within seconds are left
    out; 404 if none does.
    """

    client: EngineClient
    pool: EnginePool
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _told: list[int] = field(default_factory=list, init=False)
    _told_s: float = field(default=float("-inf"), init=False)  # when that was asked for

    async def serve(self, exchange: Exchange) -> None:
        """Answer a GET. Clients that come while engines are asked share what is asked after it."""
        came_s = monotonic()
        async with self._turn:
            if self._told_s < came_s:
                asked_s = monotonic()
                self._told, self._told_s = await self._ask_all(), asked_s
        if self._told:
            exchange.respond(200, orjson.dumps({"server_load": sum(self._told)}))
        else:
            error = endpoint_not_served(LOAD, ())
            exchange.respond(error.status, error.body())

    async def _ask_all(self) -> list[int]:
        joined = [engine for engine in self.pool.all() if engine.identity is not None]
        told = await asyncio.gather(*map(self._ask, joined))
        return [load for load in told if load is not None]

    async def _ask(self, engine: Engine) -> int | None:
        if engine.identity is None or not engine.identity.serves(LOAD):
            return None
        try:
            status, body = await self.client.call(engine, LOAD, b"")
            load = orjson.loads(bounded(body))["server_load"] if status == 200 else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return load if isinstance(load, int) else None
