"""What the connections to an engine show of its life."""

import asyncio
from time import monotonic

from tests.unit.router.http.test_client import CHUNKED, LATER, Sink

from kvrouter.http.client.pool import ConnectionPool
from kvrouter.http.deadlines import NEVER, DeadlineTimer

EVENT, COMMENT = b"a\r\ndata: {}\n\n\r\n", b"5\r\n: a\n\n\r\n"


async def test_connections_know_what_their_engine_last_gave() -> None:
    go = asyncio.Event()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + EVENT)
        await go.wait()
        writer.write(COMMENT)
        await reader.read()
        writer.close()

    server, timer = await asyncio.start_server(speak, "127.0.0.1", 0), DeadlineTimer(loop(), 0.05)
    port = server.sockets[0].getsockname()[1]
    pool = ConnectionPool("127.0.0.1", port, timer)
    before_s = monotonic() - 0.01  # the loop's clock is coarser
    answer = await pool.send("POST", "/", deadlines=LATER)
    await answer.first_event(5, lambda comments: None)
    (connection,) = pool
    head_s, owes, _ = connection.signs()
    assert before_s < head_s < monotonic() + 0.01
    assert owes is None  # no stream is relayed yet
    sink = Sink()
    task = asyncio.create_task(answer.relay_to(sink, 20))
    await sink.pieces.get()
    _, owes_s, events = connection.signs()
    assert owes_s is not None
    assert events == 1
    go.set()
    await sink.pieces.get()
    heard_s, still_s, events = connection.signs()
    assert (still_s, events) == (owes_s, 1)
    assert heard_s > owes_s  # a comment is a sign of the server alone
    answer.pause()
    assert connection.signs()[1] == NEVER
    answer.resume()
    assert owes_s <= (connection.signs()[1] or 0) < NEVER
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert connection.signs()[1] is None
    pool.close()
    server.close()
    timer.close()


def loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()
