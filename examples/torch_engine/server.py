"""The engine's HTTP side: OpenAI's completions, and what a router asks of a vLLM engine."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch
import transformers
from aiohttp import web

from kvrouter_store.descriptors import raise_limit
from kvrouter_store.errors import KVStoreError
from kvrouter_store.node.signals import Signals

from .generation import Engine, Generated
from .model import Model, ModelRefused
from .requests import Answers, BadRequest, CompletionRequest
from .settings import EngineSettings

log = logging.getLogger("kvrouter_store.torch_engine")
MOST_BODY_BYTES = 16 << 20
METRICS = """\
vllm:num_requests_running{{engine="0"}} {running}
vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {computed}
vllm:prompt_tokens_by_source_total{{engine="0",source="external_kv_transfer"}} {loaded}
"""


class EngineServer:
    """Serves one engine, whose requests wait for one another."""

    def __init__(self, engine: Engine, executor: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._executor = executor
        self._counts = {"running": 0, "computed": 0, "loaded": 0}

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        about = {"object": "model", "max_model_len": self._engine.settings.max_model_len}
        card = {"id": self._engine.settings.served, **about}
        version = {"version": f"transformers {transformers.__version__}"}
        app.router.add_get("/health", _page({}))
        app.router.add_get("/version", _page(version))
        app.router.add_get("/v1/models", _page({"object": "list", "data": [card]}))
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=METRICS.format(**self._counts))

    async def _tokenize(self, request: web.Request) -> web.Response:
        """The token ids of a text, as vLLM answers them."""
        try:
            tokens = self._encode(str((await request.json())["prompt"]))
        except (ValueError, KeyError, TypeError) as error:
            return _refusal(400, f"no text to tokenize: {error}")
        most = self._engine.settings.max_model_len
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": most})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        try:
            most = self._engine.settings.max_model_len
            tokens = self._engine.model.vocabulary
            wanted = CompletionRequest.read(await request.json(), self._encode, most, tokens)
        except ValueError as error:
            return _refusal(400, str(error))
        if wanted.model != self._engine.settings.served:
            return _refusal(404, f"the model {wanted.model} does not exist")
        if wanted.stream:
            return await self._stream(request, wanted)
        try:
            answer = await self._generate(wanted, lambda token: None)
        except (KVStoreError, RuntimeError) as error:  # of the store's client, or of the device
            log.exception("a request failed")
            return _refusal(500, str(error))
        text = self._decode(answer.tokens)
        return web.json_response(Answers(wanted).whole(answer, text))

    async def _stream(self, request: web.Request, wanted: CompletionRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        tokens: asyncio.Queue[int | None] = asyncio.Queue()  # at most max_tokens
        work = asyncio.create_task(self._generate(wanted, tokens.put_nowait))
        work.add_done_callback(lambda _: tokens.put_nowait(None))
        try:
            await response.prepare(request)
            answers, sent, seen = Answers(wanted), "", list[int]()
            while (token := await tokens.get()) is not None:
                seen.append(token)
                whole = self._decode(seen)
                new = "" if whole.endswith("\ufffd") else whole[len(sent) :]  # half a character
                sent += new
                await response.write(_event(answers.token(token, new)))
            for event in answers.closing(await work, self._decode(seen)[len(sent) :]):
                await response.write(_event(event))
            await response.write(b"data: [DONE]\n\n")
        finally:
            work.cancel()
        return response

    async def _generate(
        self, wanted: CompletionRequest, on_token: Callable[[int], None]
    ) -> Generated:
        """Compute in the executor; a request whose client left ends after its next token."""
        loop, left = asyncio.get_running_loop(), asyncio.Event()

        def go_on(token: int) -> bool:
            loop.call_soon_threadsafe(on_token, token)
            return not left.is_set()

        work = loop.run_in_executor(
            self._executor, lambda: self._engine.generate(wanted.generate, go_on)
        )
        self._counts["running"] += 1
        try:
            answer = await work
        finally:
            left.set()
            self._counts["running"] -= 1
        self._counts["loaded"] += answer.cached_tokens
        self._counts["computed"] += len(wanted.generate.prompt) - answer.cached_tokens
        return answer

    def _encode(self, text: str) -> list[int]:
        if self._engine.model.tokenizer is None:
            raise BadRequest("the model has no tokenizer: send token ids")
        ids: list[int] = self._engine.model.tokenizer.encode(text)
        return ids

    def _decode(self, tokens: list[int]) -> str:
        tokenizer = self._engine.model.tokenizer
        return str(tokenizer.decode(tokens, skip_special_tokens=True)) if tokenizer else ""


def _page(content: Mapping[str, Any]) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(content)

    return answer


def _refusal(status: int, why: str) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return web.json_response(
        {"error": {"message": why, "type": kind, "code": status}}, status=status
    )


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def serve(settings: EngineSettings) -> None:
    """Serve until SIGTERM or SIGINT. Ends the program where the model cannot be served."""
    transformers.logging.disable_progress_bar()
    log.info("%s", raise_limit())
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        engine = Engine(settings, Model.load(settings))
    except (ModelRefused, OSError) as error:
        raise SystemExit(f"{settings.model} cannot be served: {error}") from None
    with closing(engine), ThreadPoolExecutor(1) as executor:
        asyncio.run(_serve(settings, EngineServer(engine, executor)))


async def _serve(settings: EngineSettings, server: EngineServer) -> None:
    signals = Signals()
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
        host, port = runner.addresses[0][:2]
        print(f"engine at http://{host}:{port}", flush=True)
        await signals.leave.wait()
    finally:
        await runner.cleanup()
