"""How engines are asked for their load: never more often than clients can use."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

from kvrouter.serving.passthrough import FleetLoad


class Engines:
    """Two engines that answer once `go` is set; `asked` counts."""

    def __init__(self) -> None:
        self.asked = 0
        self.go = asyncio.Event()
        self.told: list[Any] = []

    def all(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(identity=SimpleNamespace(serves=lambda _: True))] * 2

    async def send(self, *_: object) -> SimpleNamespace:
        self.asked += 1
        await self.go.wait()
        return SimpleNamespace(status=200, read=self._read)

    async def _read(self, *_: object) -> bytes:
        return b'{"server_load": 2}'

    def respond(self, status: int, body: bytes) -> None:
        self.told.append((status, json.loads(body)["server_load"]))


async def test_clients_that_come_while_engines_are_asked_share_one_further_look() -> None:
    engines = Engines()
    load = FleetLoad(cast("Any", engines), cast("Any", engines))
    clients = [asyncio.create_task(load.serve(cast("Any", engines))) for _ in range(10)]
    await asyncio.sleep(0)
    engines.go.set()
    await asyncio.gather(*clients)
    assert engines.asked == 4
    assert engines.told == [(200, 4)] * 10
    await load.serve(cast("Any", engines))
    assert engines.asked == 6
