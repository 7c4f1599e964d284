"""Check of KV events: whether every engine publishes them to where the router listens."""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from time import monotonic
from typing import TYPE_CHECKING, Final

import zmq

from kvrouter.engines.families import connects_publisher
from kvrouter.membership.probe_client import connection_problem
from kvrouter.prefix.events.messages import BadMessage, BlockStored, decode_batch
from kvrouter.tools.doctor.base import Found, Setup, error, warning
from kvrouter.tools.doctor.trials import ask_new_prompt
from kvrouter_store.events.sockets import Inbox, subscriber

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.tools.doctor.engines import EngineFacts

LISTEN_S: Final = 10.0  # how long each engine has to connect its publisher and to publish
TURN_S: Final = 0.5


def _topic(facts: EngineFacts) -> str:
    return f"kv@{facts.engine.address}"


class _Listener:
    """A subscriber in the router's place. `close` frees the address."""

    def __init__(self, endpoint: str) -> None:
        """Raises zmq.ZMQError if the address cannot be bound."""
        self.block_tokens: dict[str, int] = {}  # of the last block by topic; 0: an event said none
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        socket = subscriber(self._context, b"", endpoint)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._inbox = Inbox(socket, self._take)

    def close(self) -> None:
        self._inbox.close()
        self._context.destroy(linger=0)

    def _take(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3:
            return
        with suppress(BadMessage):
            events = decode_batch(frames[2]).pieces()
            sizes = [event.block_size for event in events if isinstance(event, BlockStored)]
            topic = frames[0].decode("utf-8", "replace")
            self.block_tokens[topic] = sizes[-1] if sizes else self.block_tokens.get(topic, 0)


async def kv_events(setup: Setup) -> Found:
    """With --kv-events-bind, while no router listens there: events of every engine arrive."""
    endpoint = setup.settings.kv_events_bind
    asked = setup.generating_engines
    known = [e for e in asked if connects_publisher(e.engine.family)]
    if endpoint is None or not known:
        return
    try:
        listener = _Listener(endpoint)
    except zmq.ZMQError as problem:
        if problem.errno != zmq.EADDRINUSE:  # else a router: see its kvrouter:kv_index_state
            yield error(
                "this host",
                f"KV events cannot be received at {endpoint}: {problem.strerror}",
                "give --kv-events-bind an address of this host and a port of your own",
            )
        return
    with closing(listener):
        await _listen(setup, known, listener)
    strange = sorted(listener.block_tokens.keys() - set(map(_topic, known)))
    for each in known:
        topic = _topic(each)
        block_tokens = listener.block_tokens.get(topic)
        if block_tokens is None:
            seen = f"; topics that came: {', '.join(strange)}" if strange else ""
            yield warning(
                each.name,
                f"no KV event of topic {topic} came to {endpoint} in {LISTEN_S:g} s{seen}",
                "start it with --kv-events-config and enable_kv_cache_events, an endpoint that "
                f'leads here, and "topic": "{topic}"',
            )
        elif block_tokens and block_tokens != (each.identity.block_tokens or block_tokens):
            yield warning(
                each.name,
                f"its KV events are of blocks of {block_tokens} tokens, its KV of "
                f"{each.identity.block_tokens}",
                "give --block-size and the hash block size of the engine one value",
            )


async def kv_event_ports(setup: Setup) -> Found:
    """Where engines say that they publish KV events, the router can connect to them."""
    for each in setup.generating_engines:
        refused, told = each.identity.events_refused, each.identity.event_ports.values()
        for port in (port for ports in told for port in ports if port):
            if problem := await connection_problem(each.engine.host, port, setup.deadline_s):
                refused = f"port {port}: {problem}"
        if refused is not None:
            remedy = 'give its --kv-events-config "tcp://*:5557", and open the port to the router'
            yield warning(each.name, f"not all its KV events are taken: {refused}", remedy)


async def _listen(setup: Setup, known: list[EngineFacts], listener: _Listener) -> None:
    """Let engines compute new blocks until events of each came, or their time is over."""
    until_s, silent = monotonic() + LISTEN_S, known
    while silent and monotonic() < until_s:
        await asyncio.gather(*(ask_new_prompt(setup, each) for each in silent))
        await asyncio.sleep(TURN_S)
        silent = [each for each in known if _topic(each) not in listener.block_tokens]
