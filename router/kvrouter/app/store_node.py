"""`kvrouter store`: a node of the store whose HTTP side the router's bounded server serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.control.page.server import WebServer
from kvrouter_store.node import process
from kvrouter_store.rdma.device import open_device

if TYPE_CHECKING:
    from kvrouter.http.server.exchange import Exchange
    from kvrouter_store.node.http_api import Respond
    from kvrouter_store.node.settings import StoreSettings
    from kvrouter_store.rdma.initiator import Opens


def run(settings: StoreSettings, opens: Opens = open_device) -> int:
    """As `kvrouter_store.node.process.run`."""
    return process.run(settings, http_side, opens)


def http_side(respond: Respond) -> WebServer:
    """A server whose answers are those of `respond`."""

    async def handle(exchange: Exchange) -> None:
        answer = await respond(exchange.method, exchange.path, exchange.headers)
        exchange.respond(
            answer.status, answer.body, content_type=answer.content_type, headers=answer.headers
        )

    return WebServer(handle)
