"""HTTP side of a simulated engine: vLLM's endpoints over the router's own HTTP server.

Every request is one task; a client that leaves cancels it, and its slots are free at once.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from random import Random

import orjson
import uvloop

from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.listener import HttpServer
from kvrouter.tools.sim.adapters import Adapters
from kvrouter.tools.sim.admission import QueueFull
from kvrouter.tools.sim.answers import SimAnswer, Writer, error_body, models_body
from kvrouter.tools.sim.block_cache import Event
from kvrouter.tools.sim.engine import SimEngine
from kvrouter.tools.sim.events import EventPublisher, Faults
from kvrouter.tools.sim.failures import FailureInjection, InjectedFailure
from kvrouter.tools.sim.generation import Generation
from kvrouter.tools.sim.requests import (
    GenerateRequest,
    Kind,
    RequestError,
    parse_request,
    parse_tokenize,
)
from kvrouter.tools.sim.settings import SimSettings
from kvrouter_store.rdma.base import RdmaUnavailable

__all__ = ["SimServer", "run"]

log = logging.getLogger("kvrouter.tools.sim")
VLLM_VERSION = "0.32.0"
_EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")
_PLAIN_TYPE = "text/plain; charset=utf-8"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GRACE_S = 1.0

Route = Callable[[Exchange], Awaitable[None]]


class SimServer:
    """One engine behind one port. `start`, then `close`."""

    def __init__(self, settings: SimSettings) -> None:
        self.settings = settings
        self._http = HttpServer(self._handle)
        self._engine: SimEngine | None = None
        self._publisher: EventPublisher | None = None
        self._adapters = Adapters()
        self._started_s = int(time.time())
        seed = time.time_ns() if settings.seed is None else settings.seed
        self._failures = FailureInjection(
            settings.failure_injection_rate, settings.failure_types, Random(seed)
        )
        self._routes: dict[tuple[str, str], Route] = {
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/reset_prefix_cache"): self._reset,
            ("POST", "/v1/load_lora_adapter"): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._unload_adapter,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/chat/completions"): self._chat,
        }

    @property
    def engine(self) -> SimEngine:
        """The engine; RuntimeError before `start`."""
        if self._engine is None:
            raise RuntimeError("the simulated engine has not been started")
        return self._engine

    async def start(self) -> int:
        """Listen, and tell the store and the router about this engine; returns the port.

        Raises OSError where the address is taken.
        """
        port = await self._http.listen(self.settings.host, self.settings.port)
        name = self.settings.advertise or f"{self.settings.host}:{port}"
        endpoint = self.settings.events_endpoint
        if endpoint is not None:
            topic = self.settings.kv_events_config.topic or f"kv@{name}"
            if name.startswith(("0.0.0.0:", ":::")):
                log.warning("no router knows an engine as %s: give --advertise HOST:PORT", name)
            self._publisher = self._make_publisher(endpoint, topic)
        self._engine = SimEngine(self.settings, name=name, publish=self._publish)
        await self._engine.start()
        return port

    async def close(self) -> None:
        """Stop listening, cut what still streams after a moment, give everything back."""
        await self._http.close(_GRACE_S)
        if self._engine is not None:
            await self._engine.close()
        if self._publisher is not None:
            self._publisher.close()

    @property
    def _names(self) -> tuple[str, ...]:
        """What a request may name as its model."""
        return (*self.settings.served_names, *self._adapters.paths)

    @property
    def kv_event_ports(self) -> tuple[int, int | None]:
        """Where its events and their replays are bound, once it has started."""
        assert self._publisher is not None
        return self._publisher.ports

    def _make_publisher(self, endpoint: str, topic: str) -> EventPublisher:
        settings, config = self.settings, self.settings.kv_events_config
        lost, repeated = settings.kv_events_lost, settings.kv_events_repeated
        faults = Faults(lost, repeated, settings.kv_events_late)
        return EventPublisher(
            endpoint,
            topic,
            settings.block_size,
            replay_endpoint=config.replay_endpoint,
            buffer_steps=config.buffer_steps,
            faults=faults if faults != Faults() else None,
            seed=settings.seed,
        )

    def _publish(self, events: list[Event]) -> None:
        if self._publisher is not None:
            self._publisher.publish(events)

    async def _handle(self, exchange: Exchange) -> None:
        route = self._routes.get((exchange.method, exchange.path))
        if route is None or self._engine is None:
            known = any(path == exchange.path for _, path in self._routes)
            status, kind = (405, "Method Not Allowed") if known else (404, "Not Found")
            refusal = RequestError(kind, status=status, type=kind)
            exchange.respond(status, error_body(refusal, status))
            return
        try:
            await route(exchange)
        except RequestError as error:
            exchange.respond(error.status, error_body(error, error.status))
        except QueueFull:
            busy = RequestError("Too many requests wait.", status=429, type="TooManyRequestsError")
            exchange.respond(429, error_body(busy, 429), headers=[("retry-after", "1")])

    async def _health(self, exchange: Exchange) -> None:
        exchange.respond(200)

    async def _version(self, exchange: Exchange) -> None:
        exchange.respond(200, orjson.dumps({"version": VLLM_VERSION, "simulator": "kvrouter"}))

    async def _metrics(self, exchange: Exchange) -> None:
        exchange.respond(200, self.engine.metrics.exposition(), content_type=_METRICS_TYPE)

    async def _models(self, exchange: Exchange) -> None:
        settings = self.settings
        body = models_body(
            settings.served_names,
            settings.model,
            settings.context_tokens,
            self._started_s,
            self._adapters.paths,
        )
        exchange.respond(200, body)

    async def _tokenize(self, exchange: Exchange) -> None:
        tokens = parse_tokenize(exchange.body, self.engine.tokenizer, self._names)
        answer = {
            "count": len(tokens),
            "max_model_len": self.settings.context_tokens,
            "tokens": tokens,
            "token_strs": None,
        }
        exchange.respond(200, orjson.dumps(answer))

    async def _reset(self, exchange: Exchange) -> None:
        self.engine.reset_cache()
        exchange.respond(200)

    async def _load_adapter(self, exchange: Exchange) -> None:
        told = self._adapters.load(exchange.body)
        exchange.respond(200, told.encode(), content_type=_PLAIN_TYPE)

    async def _unload_adapter(self, exchange: Exchange) -> None:
        told = self._adapters.unload(exchange.body)
        exchange.respond(200, told.encode(), content_type=_PLAIN_TYPE)

    async def _completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, "completion")

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, "chat")

    async def _generate(self, exchange: Exchange, kind: Kind) -> None:
        settings, engine = self.settings, self.engine
        request = parse_request(
            exchange.body, kind, engine.tokenizer, self._names, settings.context_tokens
        )
        request = replace(request, adapter=self._adapters.find(request.model))
        failure = self._failures.draw()
        if failure is not None:
            self._fail(exchange, failure)
            return
        writer = Writer(request, exchange.headers.get("x-request-id"))
        tell = _Stream(exchange, writer) if request.stream else None
        answers = await _together(
            [self._choice(one, at, tell) for at, one in enumerate(request.choices())]
        )
        if tell is None:
            exchange.respond(200, writer.body(answers))
        else:
            exchange.write(writer.closing(answers))
            exchange.end()

    async def _choice(
        self, request: GenerateRequest, index: int, tell: "_Stream | None"
    ) -> SimAnswer:
        """One choice of a request, from its slots to its last token."""
        generation = await self.engine.admit(request)
        try:
            await generation.prefill()
            if tell is not None:
                tell.open(index)
            while not generation.done:
                token, text = await generation.next_token()
                if tell is not None:
                    await tell.token(index, generation, token, text)
        finally:
            generation.close()
        return generation.answer

    def _fail(self, exchange: Exchange, failure: InjectedFailure) -> None:
        self.engine.metrics.injected.inc()
        exchange.respond(failure.status, error_body(failure, failure.status))


class _Stream:
    """Writes the tokens of all choices into one stream, as they come."""

    def __init__(self, exchange: Exchange, writer: Writer) -> None:
        self._exchange = exchange
        self._writer = writer

    def open(self, index: int) -> None:
        """The prompt of a choice is computed."""
        if not self._exchange.started:
            self._exchange.start(200, [_EVENT_STREAM])
        self._exchange.write(self._writer.opening(index))

    async def token(self, index: int, generation: Generation, token: int, text: str) -> None:
        """The next token of a choice; waits for a client that reads too slowly."""
        event = self._writer.token(index, generation.answer, token, text, generation.done)
        self._exchange.write(event)
        if self._exchange.paused:
            await self._exchange.drain()


async def _together(runs: Sequence[Coroutine[None, None, SimAnswer]]) -> list[SimAnswer]:
    """All choices at once; the first failure ends the others."""
    if len(runs) == 1:
        return [await runs[0]]
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _serve(settings: SimSettings) -> int:
    server = SimServer(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        port = await server.start()
    except OSError as error:
        why = error.strerror or error
        print(f"kvrouter sim: {why}; give another --host or --port", file=sys.stderr)
        await server.close()
        return 2
    except RdmaUnavailable as problem:
        print(f"kvrouter sim: --store-transport rdma: {problem}", file=sys.stderr)
        await server.close()
        return 2
    print(
        f"kvrouter sim: {settings.role} engine of {settings.model} "
        f"listening on http://{settings.host}:{port}",
        flush=True,
    )
    await stop.wait()
    await server.close()
    return 0


def run(settings: SimSettings) -> int:
    """Serve until SIGINT or SIGTERM; the exit status."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(message)s")
    return uvloop.run(_serve(settings))
