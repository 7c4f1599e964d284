"""Requests that are no legs, on one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.engines.engine import Engine, Role
from kvrouter.http.client.pool import EngineResponse, UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.serving.legs.engine_client import EngineClient, check_plain
from kvrouter.serving.legs.failures import failure_of

if TYPE_CHECKING:
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
