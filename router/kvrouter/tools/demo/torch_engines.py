"""The demo on two engines of `kvrouter_store.torch_engine`: any small model, without vLLM.

torch is not imported here: it may be in another environment.
"""

import asyncio
import os
from pathlib import Path

from kvrouter.tools.demo.children import Child, Children
from kvrouter.tools.demo.real_engines import BLOCK_TOKENS, RealEngines
from kvrouter.tools.demo.settings import DemoSettings


class TorchEngines(RealEngines):
    """Both engines on half of the processors each."""

    chats = False
    at_once = 1
    log_probabilities = False

    def __init__(self, settings: DemoSettings, python: str) -> None:
        super().__init__(settings)
        self._python = python

    def opening(self) -> str:
        """See `DemoEngines`."""
        return (
            "starting a store, a prefill and a decode engine (transformers, "
            f"{self.settings.model}) and the router"
        )

    async def start_engines(
        self, children: Children, folder: Path, store: str, events: str
    ) -> dict[str, Child]:
        """See `DemoEngines`; they publish no events."""
        program = (self._python, "-m", "kvrouter_store.torch_engine")
        start_s, names = self.settings.start_timeout_s, (*self.prefill, *self.decode)
        starts = (
            children.start(name, *self._flags(name, store), program=program, start_s=start_s)
            for name in names
        )
        return dict(zip(names, await asyncio.gather(*starts), strict=True))

    def _flags(self, name: str, store: str) -> list[str]:
        context = -(-self.context_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        return [
            *("--model", self.settings.model, "--served-model-name", self.model, "--name", name),
            *("--role", name.partition("-")[0], "--store", store, "--threads", str(threads)),
            *("--block-tokens", str(BLOCK_TOKENS), "--max-model-len", str(context)),
        ]
