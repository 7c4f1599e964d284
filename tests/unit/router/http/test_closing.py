"""How the HTTP server drains, stops listening and closes, over real sockets."""

import asyncio

import pytest
from tests.unit.router.http.conftest import GET, Dial, Serve, Wire, hello

from kvrouter.http.server.connection import Connection
from kvrouter.http.server.exchange import Exchange


async def test_closing_lets_an_answer_end_and_refuses_new_connections(
    serve: Serve, dial: Dial
) -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        began.set()
        await go.wait()
        exchange.respond(200, b"done")

    server = await serve(handler)
    idle = await dial(server)
    busy = await dial(server)
    busy.send(GET)
    await began.wait()
    closing = asyncio.create_task(server.close(grace_s=10))
    assert await idle.at_end()
    go.set()
    status, headers, body = await busy.answer()
    assert (status, headers["connection"], body) == (200, "close", b"done")
    await closing
    assert server.connections == 0


async def test_a_server_that_drains_serves_on_and_says_that_it_closes(
    serve: Serve, dial: Dial
) -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        if exchange.path == "/held":
            began.set()
            await go.wait()
        exchange.respond(200, exchange.path.encode())

    server = await serve(handler)
    idle, busy, half = await dial(server), await dial(server), await dial(server)
    busy.send(b"GET /held HTTP/1.1\r\nHost: h\r\n\r\nGET /behind HTTP/1.1\r\nHost: h\r\n\r\n")
    half.send(b"GET /half HTTP/1.1\r\nHost: h\r\n\r\nGET /h")
    await half.answer()
    await began.wait()
    server.drain()
    fresh = await dial(server)
    for wire in (idle, fresh):
        wire.send(GET)
        status, headers, _ = await wire.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await wire.at_end()
    port = server.port
    server.stop_listening()
    with pytest.raises(ConnectionError):
        await Wire.dial(port)
    half.send(b"alf HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (await half.answer())[1]["connection"] == "close"
    go.set()
    status, headers, body = await busy.answer()
    assert (status, "connection" in headers, body) == (200, False, b"/held")
    status, headers, body = await busy.answer()
    assert (status, headers["connection"], body) == (200, "close", b"/behind")
    async with asyncio.timeout(10):
        await server.emptied()


@pytest.mark.slow
async def test_a_head_that_does_not_come_keeps_a_server_for_two_seconds_only(
    serve: Serve, dial: Dial
) -> None:
    server = await serve(hello, head_timeout_s=600)
    wire = await dial(server)
    wire.send(GET + b"GET /h")
    await wire.answer()
    server.stop_listening()
    assert (await wire.answer())[0] == 408
    assert await wire.at_end()


async def test_an_answer_that_began_before_the_drain_is_the_last_of_its_connection(
    serve: Serve, dial: Dial
) -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        exchange.start(200)
        exchange.write(b"a")
        began.set()
        await go.wait()
        exchange.end()

    server = await serve(handler)
    wire = await dial(server)
    wire.send(GET)
    await began.wait()
    server.stop_listening()
    go.set()
    _, headers, body = await wire.answer()
    assert ("connection" in headers, body) == (False, b"a")
    assert await wire.at_end()


async def test_closing_cuts_off_what_outlives_the_grace(serve: Serve, dial: Dial) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            assert not exchange.closed
            ended.set()

    server = await serve(handler)
    wire = await dial(server)
    wire.send(GET)
    await began.wait()
    await server.close(grace_s=0.02)
    assert ended.is_set()
    status, headers, _ = await wire.answer()
    assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
    assert await wire.at_end()


async def test_a_request_is_answered_whose_handler_is_cut_off_before_its_first_step(
    serve: Serve,
) -> None:
    async def handler(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    server, made = await serve(handler), list[Connection]()
    loop = asyncio.get_running_loop()

    def accept() -> Connection:
        made.append(Connection(server, loop))
        return made[-1]

    listening = await loop.create_server(accept, "127.0.0.1", 0)
    async with listening:
        wire = await Wire.dial(listening.sockets[0].getsockname()[1])
        while not server.connections:
            await asyncio.sleep(0)
        made[0].data_received(GET)
        made[0].cut_off()
        assert (await wire.answer())[0] == 503
        assert await wire.at_end()
        wire.close()


async def test_a_handler_that_is_cut_off_may_end_its_answer(serve: Serve, dial: Dial) -> None:
    began = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        exchange.start(200)
        exchange.write(b"begun, ")
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            exchange.write(b"cut off")
            exchange.end()

    server = await serve(handler)
    wire = await dial(server)
    wire.send(GET)
    await began.wait()
    await server.close()
    assert (await wire.answer())[2] == b"begun, cut off"
    assert await wire.at_end()
