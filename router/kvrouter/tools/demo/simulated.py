"""The demo on simulated engines. Their answers are a function of KV bytes, so they are known."""

import asyncio
from dataclasses import replace
from pathlib import Path

from kvrouter.tools.demo.children import Child, Children
from kvrouter.tools.demo.cluster import Cluster, free_port, start_router, start_store
from kvrouter.tools.demo.settings import DemoSettings
from kvrouter.tools.demo.workload import CHAT, Reply
from kvrouter.tools.sim.oracle import Oracle
from kvrouter.tools.sim.settings import SimSettings


class Simulated:
    """Two prefill and two decode engines; an oracle knows their right answers.

    Attributes:
        model: the name that they serve.
        prefill, decode: names of the engines; the demo kills the first prefill engine.
    """

    model = "demo-8b"
    prefill = ("prefill-0", "prefill-1")
    decode = ("decode-0", "decode-1")

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings
        self._oracle = Oracle(SimSettings(model=self.model).manifest)

    async def start(self, children: Children, folder: Path) -> Cluster:
        """Start store, engines and router; returns when all are ready. Raises ChildFailed."""
        store = await start_store(children, folder, "256MiB")
        events = f"tcp://127.0.0.1:{free_port()}"
        engines = await self._start_engines(children, self.engine_flags(store.urls["kv"], events))
        roles = [[engines[name] for name in names] for names in (self.prefill, self.decode)]
        router = await start_router(children, self.settings.port, store, roles, events)
        return Cluster(store, engines, router)

    async def _start_engines(self, children: Children, flags: tuple[str, ...]) -> dict[str, Child]:
        """The engines, by name; they take free ports."""
        names = (*self.prefill, *self.decode)
        started = await asyncio.gather(
            *(children.start(name, "sim", "--role", name.split("-")[0], *flags) for name in names)
        )
        return dict(zip(names, started, strict=True))

    def engine_flags(self, store: str, events: str) -> tuple[str, ...]:
        """The flags of every engine."""
        prefill_time = f"{self.settings.prefill_time_per_token_us}us"
        return (
            *("--port", "0", "--model", self.model, "--store", store),
            *("--kv-events-endpoint", events, "--prefill-time-per-token", prefill_time),
            *("--inter-token-latency", "5ms"),
        )

    def checked(self, replies: list[Reply]) -> list[Reply]:
        """The replies, each with its problem."""
        answer_tokens = self.settings.answer_tokens
        return [checked_reply(self._oracle, reply, answer_tokens) for reply in replies]


def checked_reply(oracle: Oracle, reply: Reply, answer_tokens: int) -> Reply:
    """The reply with its problem. This takes CPU time: do it when no request is in flight."""
    if reply.problem:
        return reply
    body, tokenizer = reply.body, oracle.tokenizer
    if reply.path == CHAT:
        prompt = tokenizer.render_chat(body["messages"])
    else:
        prompt = tokenizer.encode(body["prompt"])
    if reply.prompt_tokens != len(prompt):
        wrong = f"its usage counts {reply.prompt_tokens} prompt tokens, there are {len(prompt)}"
        return replace(reply, problem=wrong)
    if reply.text != oracle.text(prompt, answer_tokens):
        return replace(reply, problem=f"it answered {reply.text!r}, which is wrong")
    return reply
