"""Requests to engines that are no client's: each within seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.http.client.pool import Deadlines
from kvrouter.http.client.response import UpstreamError
from kvrouter.serving.legs.leg import KEPT_BYTES

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine
    from kvrouter.serving.legs.leg import EngineClient

_DEADLINES: Final = Deadlines(connect_s=2.0, first_byte_s=5.0, idle_s=5.0)
_JSON: Final = b"content-type: application/json\r\n"


async def call(  # noqa: PLR0917
    client: EngineClient,
    engine: Engine,
    path: str,
    body: bytes,
    fields: bytes = _JSON,
    deadlines: Deadlines = _DEADLINES,
) -> tuple[int, bytes]:
    """Status and body of the answer; OSError: none came in time."""
    try:
        answer = await client.send(engine, path, fields, body, deadlines)
        return answer.status, await answer.read(KEPT_BYTES, deadlines.idle_s)
    except UpstreamError as error:
        raise OSError(str(error)) from None


async def post(
    client: EngineClient, engine: Engine, path: str, body: bytes, deadline_s: float
) -> bytes:
    """The body of a 200, else as `call`; raises ValueError for any other status."""
    deadlines = Deadlines(deadline_s, deadline_s, deadline_s)
    status, content = await call(client, engine, path, body, deadlines=deadlines)
    if status != 200:
        raise ValueError(f"{path} answers {status}")
    return content
