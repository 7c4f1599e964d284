"""The sockets of KV events: publishers that connect to the router, and those it connects to."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvrouter.prefix.events.replay import Replayer
from kvrouter.prefix.events.tracker import TOPIC_PREFIX, CacheTracker
from kvrouter_store.events.sockets import Inbox, Turns, endpoint_of, open_context, subscriber

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EnginePool
    from kvrouter.prefix.events.settings import KvEventSettings

log = logging.getLogger(__name__)


class EventIntake:
    """All sockets of KV events, on the running loop; its owner calls `close`.

    OSError: the address cannot be bound.
    """

    def __init__(self, settings: KvEventSettings, tracker: CacheTracker, pool: EnginePool) -> None:
        self._context = open_context()
        turns = Turns(tracker.work)
        tracker.wake = turns.wake
        self._replayer: Replayer | None = None
        self._connector: EventConnector | None = None
        self.subscriber: EventSubscriber | None = None
        try:
            if settings.kv_events_bind is not None:
                endpoint = settings.kv_events_bind
                self.subscriber = EventSubscriber(endpoint, tracker, self._context, turns)
                pool.on_join(self.subscriber.engine_joined)
        except OSError:
            self._context.destroy(linger=0)
            raise
        if settings.kv_replay_ports:
            self._replayer = Replayer(self._context, settings.kv_replay_ports, tracker, turns)
            tracker.replays = self._replayer
        if settings.kv_events_ports:
            self._connector = EventConnector(
                self._context, settings.kv_events_ports, tracker, turns
            )
            pool.on_join(self._connector.engine_joined)

    def forget(self, engine: Engine) -> None:
        """`engine` will not come back."""
        if self._connector is not None:
            self._connector.forget(engine)

    def close(self) -> None:
        """Close every socket. Idempotent."""
        for part in (self._replayer, self._connector, self.subscriber):
            if part is not None:
                part.close()
        self._context.destroy(linger=0)


class EventSubscriber:
    """A bound SUB socket, to which engines connect their publishers.

    Each data-parallel rank publishes to the endpoint's port plus its number
    (`ZmqEventPublisher.offset_endpoint_port` of vLLM and SGLang). Those ports are bound when an
    engine with such ranks joins, and stay bound.

    `endpoint` is tcp://HOST:PORT (port 0 takes a free one) or ipc:///PATH; OSError: it cannot be
    bound.
    """

    def __init__(
        self,
        endpoint: str,
        tracker: CacheTracker,
        context: zmq.Context[zmq.Socket[bytes]],
        turns: Turns,
    ) -> None:
        self._socket = subscriber(context, TOPIC_PREFIX.encode())
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            self._socket.bind(endpoint.replace(":0", ":*") if endpoint.endswith(":0") else endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise OSError(
                error.errno, f"--kv-events-bind {endpoint}: {os.strerror(error.errno or 0)}"
            ) from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._event_ranks = {0}
        self._closed = False
        self._inbox = Inbox(self._socket, tracker.receive, turns)

    def engine_joined(self, engine: Engine) -> None:
        """Bind the port of its rank. If it is in use, that is logged, and its events are lost."""
        rank = engine.event_rank
        if rank in self._event_ranks or self._closed or not self.endpoint.startswith("tcp:"):
            return
        self._event_ranks.add(rank)
        host, _, port = self.endpoint.rpartition(":")
        endpoint = f"{host}:{int(port) + rank}"
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            log.error(
                "KV events of data-parallel ranks %d cannot be taken at %s: %s; give "
                "--kv-events-bind a port behind which as many are free as there are ranks",
                rank,
                endpoint,
                os.strerror(error.errno or 0),
            )

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._closed = True
        self._inbox.close()


@dataclass(eq=False)
class EventConnector:
    """A SUB socket for each engine whose publisher is bound, as vLLM's is by default.

    It connects when an engine joins, to its host and the port of its publisher plus the number of a
    data-parallel rank, and reconnects until the engine is forgotten. The tracker finds out what was
    lost meanwhile. The connection shows the sender of a message: topics are ignored.

    `ports` are those of publishers, by the engine's address; under "" that of all others.
    """

    context: zmq.Context[zmq.Socket[bytes]]
    ports: Mapping[str, int]
    tracker: CacheTracker
    turns: Turns

    def __post_init__(self) -> None:
        self._inboxes: dict[Engine, tuple[Inbox, Inbox]] = {}

    def engine_joined(self, engine: Engine) -> None:
        """Connect to its publisher, unless that was done before.

        If no more sockets can be opened, that is logged, and its events are lost.
        """
        port = self.ports.get(engine.server.address, self.ports.get("", 0))
        if not port or engine in self._inboxes:
            return
        try:
            self._inboxes[engine] = self._connect(engine, port + engine.event_rank)
        except zmq.ZMQError as error:
            self.tracker.forget(engine)  # a replay tells what it holds now, but not what follows
            log.warning("KV events of %s are not taken: %s", engine.address, error)

    def _connect(self, engine: Engine, port: int) -> tuple[Inbox, Inbox]:
        server, seen = engine.server, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        with ExitStack() as opened:
            socket = subscriber(self.context, b"")
            opened.callback(socket.close)
            socket.setsockopt(zmq.IPV6, ":" in server.host)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            opened.callback(socket.disable_monitor)
            monitor = socket.get_monitor_socket(seen)
            opened.callback(monitor.close)
            socket.connect(endpoint_of(server.host, port))
            opened.pop_all()

        def take(frames: Sequence[bytes]) -> None:
            self.tracker.receive_from(server, frames)

        def note(frames: Sequence[bytes]) -> None:
            if parse_monitor_message(list(frames))["event"] == zmq.EVENT_DISCONNECTED:
                self.tracker.disconnected(engine)
            else:
                self.tracker.connected(engine)

        return Inbox(socket, take, self.turns), Inbox(monitor, note, self.turns)

    def forget(self, engine: Engine) -> None:
        """`engine` will not come back."""
        inbox, monitor = self._inboxes.pop(engine, (None, None))
        if inbox is not None and monitor is not None:
            inbox.socket.disable_monitor()
            monitor.close()
            inbox.close()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for engine in list(self._inboxes):
            self.forget(engine)
