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
from kvrouter.tools.sim.answers import (
    MessagesWriter,
    ResponsesWriter,
    SimAnswer,
    Writer,
    chat_of,
    models_body,
)
from kvrouter.tools.sim.engine import SimEngine
from kvrouter.tools.sim.events import EventPublisher, Faults
from kvrouter.tools.sim.requests import (
    GenerateRequest,
    json_object,
    no_request,
    parse_request,
    parse_tokenize,
)
from kvrouter.tools.sim.settings import FAILURES, SimSettings
from kvrouter_store.descriptors import connections, lack, raise_limit
from kvrouter_store.node.signals import Signals
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


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, kind="InvalidUserInput")


class SimServer:
    """One engine behind one port. `start`, then `close`."""

    def __init__(self, settings: SimSettings) -> None:
        self.settings = settings
        self.http = HttpServer(self._handle, Limits(connections=connections(MOST_CLIENTS, 1)))
        self.version = VLLM_VERSION  # as /version names it
        self._engine: SimEngine | None = None
        self._publisher: EventPublisher | None = None
        self._adapters: dict[str, str] = {}
        self._started_s = int(time.time())
        self._random = Random(time.time_ns() if settings.seed is None else settings.seed)
        self._routes: tuple[tuple[str, str, Handler], ...] = (
            ("GET", "/health", self._health),
            ("GET", "/ping", self._health),
            ("GET", "/version", self._version),
            ("GET", "/metrics", self._metrics),
            ("GET", "/v1/models", self._models),
            ("GET", "/kv_event_sources", self._event_sources),
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
            config = settings.kv_events_config
            lost, repeated = settings.kv_events_lost, settings.kv_events_repeated
            self._publisher = EventPublisher(
                settings.events_endpoint,
                config.topic or f"kv@{name}",
                settings.block_size,
                replay_endpoint=config.replay_endpoint,
                buffer_steps=config.buffer_steps,
                faults=Faults(lost, repeated, settings.kv_events_late),
                seed=settings.seed,
            )
        publish = self._publisher.publish if self._publisher is not None else lambda events: None
        self._engine = SimEngine(settings, name=name, publish=publish)
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
        return (*self.settings.served_names, *self._adapters)

    @property
    def kv_event_ports(self) -> tuple[int, int | None]:
        """The bound ports of its events and their replays, after `start`."""
        assert self._publisher is not None
        return self._publisher.ports

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
        body = models_body(names, settings.model, length, self._started_s, self._adapters)
        exchange.respond(200, body)

    async def _event_sources(self, exchange: Exchange) -> None:
        sources = {"0": self._publisher.source} if self._publisher is not None else {}
        exchange.respond(200, orjson.dumps(sources))

    async def _tokenize(self, exchange: Exchange) -> None:
        tokens = parse_tokenize(exchange.body, self.engine.tokenizer, self._names)
        answer = {"count": len(tokens), "tokens": tokens, "token_strs": None}
        answer["max_model_len"] = self.settings.context_tokens
        exchange.respond(200, orjson.dumps(answer))

    async def _reset(self, exchange: Exchange) -> None:
        self.engine.reset_cache()
        exchange.respond(200)

    async def _load_adapter(self, exchange: Exchange) -> None:
        """Load a LoRA adapter, by the rules of vLLM's OpenAIServingModels."""
        data = json_object(exchange.body, _invalid)
        name, path = data.get("lora_name"), data.get("lora_path")
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
        if name in self._adapters and data.get("load_inplace") is not True:
            raise _invalid(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
        self._adapters[name] = path
        answer = f"Success: LoRA adapter '{name}' added successfully."
        exchange.respond(200, answer.encode(), content_type=_PLAIN_TYPE)

    async def _unload_adapter(self, exchange: Exchange) -> None:
        name = json_object(exchange.body, _invalid).get("lora_name")
        if not (isinstance(name, str) and name):
            raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self._adapters:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
        del self._adapters[name]
        answer = f"Success: LoRA adapter '{name}' removed successfully."
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
        model = request.model
        adapter = (model, self._adapters[model]) if model in self._adapters else None
        return replace(request, adapter=adapter)

    async def _generate(self, exchange: Exchange) -> None:
        data, path, engine = json_object(exchange.body, no_request), exchange.path, self.engine
        request = self._request(data, path)
        if self._random.random() * 100 < self.settings.failure_injection_rate:
            engine.metrics.injected.inc()
            kind = self._random.choice(self.settings.failure_types or list(FAILURES))
            status, message, param = FAILURES[kind]
            raise ApiError(status, f"{message} (injected).", param=param)
        writer: AnyWriter = Writer(request, exchange.headers.get("x-request-id"))
        if path == RESPONSES:
            writer = ResponsesWriter(request, data)
        elif path == MESSAGES:
            writer = MessagesWriter(request)
        answers = await _together(
            [self._choice(exchange, writer, *each) for each in enumerate(request.choices())]
        )
        if request.stream:
            exchange.write(writer.closing(answers))
            exchange.end()
        else:
            exchange.respond(200, writer.body(answers))

    async def _choice(
        self, exchange: Exchange, writer: AnyWriter, index: int, request: GenerateRequest
    ) -> SimAnswer:
        """One choice of a request, from its slots to its last token.

        In a stream it waits for a client that reads too slowly.
        """
        generation = await self.engine.admit(request)
        answer = generation.answer
        try:
            await generation.prefill()
            if request.stream:
                if not exchange.started:
                    exchange.start(200, [_EVENT_STREAM])
                exchange.write(writer.opening(index))
            while not generation.done:
                token, text = await generation.next_token()
                if request.stream:
                    exchange.write(writer.token(index, answer, token, text, generation.done))
                    if exchange.paused:
                        await exchange.drain()
        finally:
            generation.close()
        return answer


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
    server, signals, loop = SimServer(settings), Signals(), asyncio.get_running_loop()
    try:
        port = await server.start()
        loop.add_signal_handler(signal.SIGUSR1, server.engine.core.clear)
        loop.add_signal_handler(signal.SIGUSR2, server.engine.core.set)
        print(
            f"kvrouter sim: {settings.role} engine of {settings.model} "
            f"listening on http://{settings.host}:{port}",
            flush=True,
        )
        await signals.leave.wait()
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
