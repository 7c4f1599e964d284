"""HTTP side of a simulated engine: vLLM's endpoints over the router's own HTTP server.

Every request is one task. If its client leaves, the task is cancelled and its slots are free.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final
from uuid import uuid4

import orjson
import uvloop

from kvrouter.errors import ApiError
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.large_blocks import return_large_blocks
from kvrouter.http.server.limits import Limits
from kvrouter.http.server.listener import HttpServer
from kvrouter.http.server.routes import RouteTable
from kvrouter.openai.endpoints import (
    CHATS,
    COMPLETIONS,
    GENERATION,
    MESSAGES,
    RESPONSES,
    WITH_LEGS,
)
from kvrouter.tools.sim.agents import MessagesWriter, ResponsesWriter, chat_of
from kvrouter.tools.sim.answers import SimAnswer, Writer, models_body
from kvrouter.tools.sim.block_cache import Event
from kvrouter.tools.sim.engine import SimEngine
from kvrouter.tools.sim.events import EventPublisher, Faults
from kvrouter.tools.sim.failures import FailureInjection
from kvrouter.tools.sim.generation import Generation
from kvrouter.tools.sim.requests import (
    GenerateRequest,
    json_object,
    no_request,
    parse_request,
    parse_tokenize,
)
from kvrouter.tools.sim.settings import SimSettings
from kvrouter_store.descriptors import connections, lack, raise_limit
from kvrouter_store.rdma.base import RdmaUnavailable

log = logging.getLogger("kvrouter.tools.sim")
VLLM_VERSION = "0.32.0"
_EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")
_PLAIN_TYPE = "text/plain; charset=utf-8"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SALTED: Final[dict[str, object]] = {
    "requestBody": {
        "content": {"application/json": {"schema": {"properties": {"cache_salt": {}}}}},
    },
}
"""That the body at a path may have a `cache_salt`, as a router wants to know."""
_RENDER = "/render"
_GRACE_S = 1.0
MOST_CLIENTS: Final = Limits().connections

AnyWriter = Writer | MessagesWriter | ResponsesWriter
Handler = Callable[[Exchange], Awaitable[None]]


class Adapters:
    """The loaded LoRA adapters: names and paths, by the rules of vLLM's OpenAIServingModels."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    @property
    def paths(self) -> Mapping[str, str]:
        """The path of each by its name, in the order of loading."""
        return self._paths

    def find(self, model: str) -> tuple[str, str] | None:
        """Name and path of the adapter that `model` names, or None."""
        path = self._paths.get(model)
        return None if path is None else (model, path)

    def load(self, body: bytes) -> str:
        """Load the adapter that a request names; vLLM's answer.

        Raises:
            ApiError: 400: it names none, or without `load_inplace` one that is loaded.
        """
        data = json_object(body, _invalid)
        name, path = data.get("lora_name"), data.get("lora_path")
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
        if name in self._paths and data.get("load_inplace") is not True:
            raise _invalid(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
        self._paths[name] = path
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: bytes) -> str:
        """Unload the adapter that a request names; vLLM's answer.

        Raises:
            ApiError: 400: it names none; 404: it is not loaded.
        """
        name = json_object(body, _invalid).get("lora_name")
        if not (isinstance(name, str) and name):
            raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self._paths:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
        del self._paths[name]
        return f"Success: LoRA adapter '{name}' removed successfully."


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, kind="InvalidUserInput")


class SimServer:
    """One engine behind one port. `start`, then `close`.

    Attributes:
        http: its HTTP server.
        version: of vLLM, as /version names it.
    """

    def __init__(self, settings: SimSettings) -> None:
        self.settings = settings
        self.http = HttpServer(self._handle, Limits(connections=connections(MOST_CLIENTS, 1)))
        self.version = VLLM_VERSION
        self._engine: SimEngine | None = None
        self._publisher: EventPublisher | None = None
        self._adapters = Adapters()
        self._started_s = int(time.time())
        seed = time.time_ns() if settings.seed is None else settings.seed
        self._failures = FailureInjection(
            settings.failure_injection_rate, settings.failure_types, Random(seed)
        )
        self._routes: tuple[tuple[str, str, Handler], ...] = (
            ("GET", "/health", self._health),
            ("GET", "/ping", self._health),
            ("GET", "/version", self._version),
            ("GET", "/metrics", self._metrics),
            ("GET", "/v1/models", self._models),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/reset_prefix_cache", self._reset),
            ("POST", "/v1/load_lora_adapter", self._load_adapter),
            ("POST", "/v1/unload_lora_adapter", self._unload_adapter),
            ("POST", COMPLETIONS, self._generate),
            ("POST", CHATS, self._generate),
            ("POST", MESSAGES, self._generate),
            ("POST", RESPONSES, self._generate),
            ("GET", "/openapi.json", self._openapi),
        )
        if settings.enable_scale_out:
            self._routes += tuple(
                ("POST", f"{path}{_RENDER}", self._render) for path in (MESSAGES, RESPONSES)
            )
        self._handlers = RouteTable[Handler](self._routes)

    @property
    def engine(self) -> SimEngine:
        """The engine; RuntimeError before `start`."""
        if self._engine is None:
            raise RuntimeError("the simulated engine has not been started")
        return self._engine

    async def start(self) -> int:
        """Listen, and register the engine with the store; returns the port.

        Raises OSError if the address is taken.
        """
        settings = self.settings
        port = await self.http.listen(settings.host, settings.port)
        name = settings.advertise or f"{settings.host}:{port}"
        if settings.events_endpoint is not None:
            if name.startswith(("0.0.0.0:", ":::")):
                log.warning("no router knows an engine as %s: give --advertise HOST:PORT", name)
            topic = settings.kv_events_config.topic or f"kv@{name}"
            self._publisher = _publisher(settings, settings.events_endpoint, topic)
        self._engine = SimEngine(settings, name=name, publish=self._publish)
        await self._engine.start()
        return port

    async def close(self) -> None:
        """Stop listening, cut off streams after a moment, and free all resources."""
        await self.http.close(_GRACE_S)
        if self._engine is not None:
            await self._engine.close()
        if self._publisher is not None:
            self._publisher.close()

    @property
    def _names(self) -> tuple[str, ...]:
        """The names that a request may have as its model."""
        return (*self.settings.served_names, *self._adapters.paths)

    @property
    def kv_event_ports(self) -> tuple[int, int | None]:
        """The bound ports of its events and their replays, after `start`."""
        assert self._publisher is not None
        return self._publisher.ports

    def _publish(self, events: list[Event]) -> None:
        if self._publisher is not None:
            self._publisher.publish(events)

    async def _handle(self, exchange: Exchange) -> None:
        try:
            if self._engine is None:
                raise ApiError(503, "The engine starts.")
            await self._handlers.find(exchange.method, exchange.path)(exchange)
        except ApiError as error:
            body = error.body(exchange.path)
            exchange.respond(error.status, body, headers=error.headers())

    async def _health(self, exchange: Exchange) -> None:
        exchange.respond(200)

    async def _version(self, exchange: Exchange) -> None:
        exchange.respond(200, orjson.dumps({"version": self.version, "simulator": "kvrouter"}))

    async def _openapi(self, exchange: Exchange) -> None:
        paths = {
            path: {method.lower(): _SALTED if path.removesuffix(_RENDER) in GENERATION else {}}
            for method, path, _ in self._routes
        }
        about = {"title": "kvrouter sim", "version": self.version}
        exchange.respond(200, orjson.dumps({"openapi": "3.1.0", "info": about, "paths": paths}))

    async def _metrics(self, exchange: Exchange) -> None:
        exchange.respond(200, self.engine.metrics.exposition(), content_type=_METRICS_TYPE)

    async def _models(self, exchange: Exchange) -> None:
        settings = self.settings
        names, length = settings.served_names, settings.context_tokens
        body = models_body(names, settings.model, length, self._started_s, self._adapters.paths)
        exchange.respond(200, body)

    async def _tokenize(self, exchange: Exchange) -> None:
        tokens = parse_tokenize(exchange.body, self.engine.tokenizer, self._names)
        answer = {"count": len(tokens), "tokens": tokens, "token_strs": None}
        answer["max_model_len"] = self.settings.context_tokens
        exchange.respond(200, orjson.dumps(answer))

    async def _reset(self, exchange: Exchange) -> None:
        self.engine.reset_cache()
        exchange.respond(200)

    async def _load_adapter(self, exchange: Exchange) -> None:
        answer = self._adapters.load(exchange.body)
        exchange.respond(200, answer.encode(), content_type=_PLAIN_TYPE)

    async def _unload_adapter(self, exchange: Exchange) -> None:
        answer = self._adapters.unload(exchange.body)
        exchange.respond(200, answer.encode(), content_type=_PLAIN_TYPE)

    async def _render(self, exchange: Exchange) -> None:
        data = json_object(exchange.body, no_request)
        request = self._request(data, exchange.path.removesuffix(_RENDER))
        answer = {"request_id": uuid4().hex, "token_ids": request.prompt, "features": None}
        exchange.respond(200, orjson.dumps({**answer, "model": request.model}))

    def _request(self, data: Mapping[str, Any], path: str) -> GenerateRequest:
        """What a body asks for at a path. Raises ApiError."""
        request = parse_request(
            data if path in WITH_LEGS else chat_of(data, path),
            "completion" if path == COMPLETIONS else "chat",
            self.engine.tokenizer,
            self._names,
            self.settings.context_tokens,
        )
        return replace(request, adapter=self._adapters.find(request.model))

    async def _generate(self, exchange: Exchange) -> None:
        data, path, engine = json_object(exchange.body, no_request), exchange.path, self.engine
        request = self._request(data, path)
        failure = self._failures.draw()
        if failure is not None:
            engine.metrics.injected.inc()
            raise failure
        writer: AnyWriter = Writer(request, exchange.headers.get("x-request-id"))
        if path == RESPONSES:
            writer = ResponsesWriter(request, data)
        elif path == MESSAGES:
            writer = MessagesWriter(request)
        stream = _Stream(exchange, writer) if request.stream else None
        answers = await _together(
            [self._choice(one, at, stream) for at, one in enumerate(request.choices())]
        )
        if stream is None:
            exchange.respond(200, writer.body(answers))
        else:
            exchange.write(writer.closing(answers))
            exchange.end()

    async def _choice(
        self, request: GenerateRequest, index: int, stream: "_Stream | None"
    ) -> SimAnswer:
        """One choice of a request, from its slots to its last token."""
        generation = await self.engine.admit(request)
        try:
            await generation.prefill()
            if stream is not None:
                stream.open(index)
            while not generation.done:
                token, text = await generation.next_token()
                if stream is not None:
                    await stream.token(index, generation, token, text)
        finally:
            generation.close()
        return generation.answer


class _Stream:
    """Writes the tokens of all choices into one stream, as they are generated."""

    def __init__(self, exchange: Exchange, writer: AnyWriter) -> None:
        self._exchange = exchange
        self._writer = writer

    def open(self, index: int) -> None:
        """Begin a choice, whose prompt is computed."""
        if not self._exchange.started:
            self._exchange.start(200, [_EVENT_STREAM])
        self._exchange.write(self._writer.opening(index))

    async def token(self, index: int, generation: Generation, token: int, text: str) -> None:
        """Write the next token of a choice; waits for a client that reads too slowly."""
        event = self._writer.token(index, generation.answer, token, text, generation.done)
        self._exchange.write(event)
        if self._exchange.paused:
            await self._exchange.drain()


def _publisher(settings: SimSettings, endpoint: str, topic: str) -> EventPublisher:
    config = settings.kv_events_config
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
        loop.add_signal_handler(signal.SIGUSR1, server.engine.core.clear)
        loop.add_signal_handler(signal.SIGUSR2, server.engine.core.set)
        print(
            f"kvrouter sim: {settings.role} engine of {settings.model} "
            f"listening on http://{settings.host}:{port}",
            flush=True,
        )
        await stop.wait()
        return 0
    except OSError as error:
        why = f"{error.strerror or error}; give another --host or --port"
    except RdmaUnavailable as problem:
        why = f"--store-transport rdma: {problem}"
    finally:
        await server.close()
    sys.stderr.write(f"kvrouter sim: {why}\n")
    return 2


def run(settings: SimSettings) -> int:
    """Serve until SIGINT or SIGTERM; the exit status."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(message)s")
    log.info("%s", raise_limit())
    return_large_blocks()
    if few := lack(MOST_CLIENTS, 1):
        log.warning("%s", few)
    return uvloop.run(_serve(settings))
