"""The demo on two engines of `kvrouter_store.torch_engine`: any small model, without vLLM.

torch is not imported here: it may be in another environment.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from kvrouter.tools.demo.alone import Alone
from kvrouter.tools.demo.children import Children
from kvrouter.tools.demo.cluster import Cluster, free_port, start_router, start_store
from kvrouter.tools.demo.settings import DemoSettings
from kvrouter.tools.demo.vllm_engines import STORE_MEMORY, context_tokens
from kvrouter.tools.demo.workload import Reply

BLOCK_TOKENS = 32


class TorchEngines:
    """A prefill and a decode engine, on half of the processors each."""

    model: str = "demo"
    prefill: Sequence[str] = ("prefill-0",)
    decode: Sequence[str] = ("decode-0",)
    chats: bool = False
    at_once: int = 1
    request_s: float = 300.0
    loaded: str = "each part's digest verified"

    def __init__(self, settings: DemoSettings, python: str) -> None:
        self.more: Mapping[str, Any] = {"ignore_eos": True, "return_token_ids": True}
        self._settings = settings
        self._python = python

    def opening(self) -> str:
        """What `start` starts, in words."""
        return (
            "starting a store, a prefill and a decode engine (transformers, "
            f"{self._settings.model}) and the router"
        )

    async def start(
        self, children: Children, session: aiohttp.ClientSession, folder: Path
    ) -> Cluster:
        """Start store, engines and router; returns when all are ready. Raises ChildFailed."""
        store = await start_store(children, folder, STORE_MEMORY)
        names = (*self.prefill, *self.decode)
        engines = await asyncio.gather(
            *(
                children.start(
                    name,
                    *self._flags(name, store.urls["kv"]),
                    program=(self._python, "-m", "kvrouter_store.torch_engine"),
                    start_s=self._settings.start_timeout_s,
                )
                for name in names
            )
        )
        roles = [[engine] for engine in engines]
        events = f"tcp://127.0.0.1:{free_port()}"
        router = await start_router(children, self._settings.port, store, roles, events)
        return Cluster(store, dict(zip(names, engines, strict=True)), router)

    async def checked(
        self, session: aiohttp.ClientSession, cluster: Cluster, replies: Sequence[Reply]
    ) -> list[Reply]:
        """The replies, each with its problem."""
        engine = cluster.engines[self.decode[0]].http
        return await Alone(session, engine, self.request_s, log_probabilities=False).checked(
            replies
        )

    def assurance(self, wrong_blocks: int) -> str:
        """What was compared."""
        return "one engine alone gave the same tokens"

    def _flags(self, name: str, store: str) -> list[str]:
        context = -(-context_tokens(self._settings) // BLOCK_TOKENS) * BLOCK_TOKENS
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        return [
            *("--model", self._settings.model, "--served-model-name", self.model, "--name", name),
            *(
                "--role",
                name.split("-", maxsplit=1)[0],
                "--store",
                store,
                "--threads",
                str(threads),
            ),
            *("--block-tokens", str(BLOCK_TOKENS), "--max-model-len", str(context)),
        ]
