"""Bytes that come behind an answer belong to nobody: no other request gets them."""

import pytest
from tests.fakes.patience import taken
from tests.unit.router.http.test_client import (
    CHUNKED,
    LATER,
    OK,
    Peer,
    Sink,
    Start,
    answers_ok,
    saying,
    start,
    timer,
)

from kvrouter.http.headers import unchunk

__all__ = ["start", "timer"]

BEHIND = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n" + b"A" * 10,
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno",
    CHUNKED + b"5\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"H",
    b"x",
    b"\r\n",
]
ANSWERS = {
    "plain": OK,
    "empty": b"HTTP/1.1 204 No Content\r\n\r\n",
    "chunked": CHUNKED + b"2\r\nok\r\n0\r\n\r\n",
    "cut": CHUNKED[:-2],  # the head does not come at once: the parser takes the chunks as well
}


@pytest.mark.parametrize("extra", BEHIND)
@pytest.mark.parametrize("kind", ANSWERS)
async def test_bytes_behind_an_answer_reach_no_other_request(
    start: Start, kind: str, extra: bytes
) -> None:
    async def overruns(peer: Peer) -> None:
        await peer.request()
        if kind == "cut":
            await peer.say(ANSWERS[kind])
            await taken()
            await peer.say(b"\r\n2\r\nok\r\n0\r\n\r\n" + extra)
        else:
            await peer.say(ANSWERS[kind] + extra)
        await answers_ok(peer)

    pool, _ = await start(overruns, answers_ok)
    for _ in range(3):
        answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
        assert await answer.read(100, 5) == (b"" if answer.status == 204 else b"ok")


@pytest.mark.parametrize("frames", [False, True])
@pytest.mark.parametrize("extra", BEHIND)
async def test_bytes_behind_a_stream_do_not_break_it(
    start: Start, extra: bytes, frames: bool
) -> None:
    said = CHUNKED + b"2\r\nok\r\n", b"2\r\nok\r\n0\r\n\r\n" + extra
    pool, peers = await start(saying(*said))
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    sink = Sink(frames=frames)
    await answer.relay_to(sink, 5)
    assert (unchunk(sink.data) if frames else sink.data) == b"okok"
    await peers[0].left()
