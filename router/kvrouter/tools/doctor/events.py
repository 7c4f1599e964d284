"""Check of KV events: whether every engine publishes them to where the router listens."""

from __future__ import annotations

import asyncio
from contextlib import closing
from time import monotonic
from typing import TYPE_CHECKING, Final

import zmq

from kvrouter.prefix.events.messages import BadMessage, Stored, decode_batch
from kvrouter.tools.doctor.base import Check, SetUp, error, warning
from kvrouter.tools.doctor.links import ask_new_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.tools.doctor.base import Finding, Found
    from kvrouter.tools.doctor.engine_facts import EngineFacts

TOPIC: Final = "kv@"
LISTEN_S: Final = 10.0
"""How long each engine has to connect its publisher and to publish."""
TURN_S: Final = 0.5
_POLL_S: Final = 0.02
_SILENT: Final = frozenset({"openai", "sglang"})
"""Families that are not vLLM, whose events these are."""


class _Listener:
    """A socket in the router's place. `close` frees the address."""

    def __init__(self, endpoint: str) -> None:
        """Raises zmq.ZMQError where the address cannot be bound."""
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.SUB)
        self.block_tokens: dict[str, int] = {}
        try:
            self._socket.subscribe(b"")
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        self._context.destroy(linger=0)

    def take(self) -> None:
        """Note what has come: by topic, the tokens of a block that was stored."""
        while self._socket.poll(0):
            frames = self._socket.recv_multipart()
            if len(frames) != 3:
                continue
            try:
                events = decode_batch(frames[2]).events
            except BadMessage:
                continue
            sizes = [event.block_size for event in events if isinstance(event, Stored)]
            topic = frames[0].decode("utf-8", "replace")
            self.block_tokens[topic] = sizes[-1] if sizes else self.block_tokens.get(topic, 0)


async def _published(setup: SetUp) -> Found:
    endpoint = setup.settings.kv_events_bind
    known = [e for e in await setup.generating_engines() if e.engine.family not in _SILENT]
    if endpoint is None or not known:
        return
    try:
        listener = _Listener(endpoint)
    except zmq.ZMQError as problem:
        if problem.errno != zmq.EADDRINUSE:  # else a router: its kvrouter:kv_index_state tells
            yield error(
                "this host",
                f"KV events cannot be taken at {endpoint}: {problem.strerror}",
                "give --kv-events-bind an address of this host and a port of your own",
            )
        return
    with closing(listener):
        await _listen(setup, known, listener)
    for found in _findings(known, listener.block_tokens, endpoint):
        yield found


async def _listen(setup: SetUp, known: list[EngineFacts], listener: _Listener) -> None:
    """Give engines something new to tell of until each has, or their time is over."""
    until_s = monotonic() + LISTEN_S
    silent = known
    while silent and monotonic() < until_s:
        turn_s = monotonic() + TURN_S
        await asyncio.gather(*(ask_new_prompt(setup, each) for each in silent))
        while silent and monotonic() < turn_s:
            listener.take()
            silent = [e for e in silent if TOPIC + e.engine.address not in listener.block_tokens]
            await asyncio.sleep(_POLL_S)


def _findings(
    known: list[EngineFacts], block_tokens: dict[str, int], endpoint: str
) -> Iterator[Finding]:
    strange = sorted(set(block_tokens) - {TOPIC + each.engine.address for each in known})
    for each in known:
        topic = TOPIC + each.engine.address
        told = block_tokens.get(topic)
        identity = each.engine.identity
        needs = identity.block_tokens if identity is not None else None
        if told is None:
            seen = f"; topics that came: {', '.join(strange)}" if strange else ""
            yield warning(
                each.name,
                f"no KV event of topic {topic} came to {endpoint} in {LISTEN_S:g} s{seen}",
                "start it with --kv-events-config and enable_kv_cache_events, an endpoint that "
                f'leads here, and "topic": "{topic}"',
            )
        elif told and needs and told != needs:
            yield warning(
                each.name,
                f"its KV events are of blocks of {told} tokens, its KV of {needs}",
                "give --block-size and the hash block size of the engine one value",
            )


CHECKS: Final = (
    Check(
        "kv-events",
        "with --kv-events-bind, while no router listens there: every engine's events come",
        _published,
    ),
)
