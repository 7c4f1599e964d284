"""The demo on a prefill and a decode engine of real vLLM, with kvrouter's connector.

vLLM is not imported here: it may be in another environment.
"""

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
import orjson

from kvrouter.tools.demo.children import Child, ChildFailed, Children
from kvrouter.tools.demo.cluster import free_port
from kvrouter.tools.demo.find_vllm import VllmFound
from kvrouter.tools.demo.real_engines import BLOCK_TOKENS, RealEngines
from kvrouter.tools.demo.settings import DemoSettings, engine_environment

KV_MEMORY, HOST_BYTES = "1G", 1 << 30
ROLES = {"prefill-0": "kv_producer", "decode-0": "kv_consumer"}
HEALTH_S = 2.0
LOOK_S = 0.25
_CAUSE = re.compile(r"\b\w*(?:Error|Exception|Refused): (?!Engine core init).*")


class VllmEngines(RealEngines):
    """Both engines on half of the processors each."""

    def __init__(self, settings: DemoSettings, vllm: VllmFound) -> None:
        super().__init__(settings)
        self._vllm = vllm

    def opening(self) -> str:
        """See `DemoEngines`."""
        return (
            f"starting a store, a prefill and a decode engine (vLLM {self._vllm.version}, "
            f"{self.settings.model}) and the router; engines take a minute or so"
        )

    async def start_engines(
        self, children: Children, folder: Path, store: str, events: str
    ) -> dict[str, Child]:
        """See `DemoEngines`."""
        engines: dict[str, Child] = {}
        for (name, role), processors in zip(ROLES.items(), _halves(), strict=True):
            port = free_port()
            command = [
                *(self._vllm.python, "-m", "vllm.entrypoints.openai.api_server"),
                *self._flags(port, name, role, store, events),
            ]
            url = f"http://127.0.0.1:{port}"
            environment = engine_environment(processors, folder)
            engines[name] = await children.launch(name, url, command, environment)
        await self._ready(children, list(engines.values()))
        return engines

    async def _ready(self, children: Children, engines: Sequence[Child]) -> None:
        """Return when all engines serve. Raises ChildFailed if one ends, or takes too long."""
        waiting = list(engines)
        limit_s = self.settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s), aiohttp.ClientSession() as session:
                while waiting := [each for each in waiting if not await _serves(session, each)]:
                    for engine in waiting:
                        if engine.process.returncode is not None:
                            raise ChildFailed(_why_it_ended(children, engine))
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            names = " and ".join(engine.name for engine in waiting)
            raise ChildFailed(
                f"{names} took longer than {limit_s:g} s to start; raise --start-timeout. The log "
                f"ends:\n{children.log_tail(waiting[0])}"
            ) from None

    def _flags(self, port: int, name: str, role: str, store: str, events: str) -> list[str]:
        """The command line: float32, so that tokens do not depend on the size of a batch."""
        settings = self.settings
        connector = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvrouter_store.connectors.vllm",
            "kv_role": role,
            "kv_connector_extra_config": {
                "url": store,
                "name": name,
                "deadline_s": 10.0,
                "cpu_bytes_to_use": HOST_BYTES,
            },
        }
        publisher = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events,
            "topic": f"kv@127.0.0.1:{port}",
        }
        return [
            *("--model", settings.model, "--served-model-name", self.model),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(self.context_tokens), "--kv-cache-memory-bytes", KV_MEMORY),
            *("--block-size", str(BLOCK_TOKENS), "--prefix-caching-hash-algo", "sha256_cbor"),
            *("--enable-prompt-tokens-details", "--kv-transfer-config", _flag(connector)),
            *("--kv-events-config", _flag(publisher)),
        ]


def _flag(value: Mapping[str, object]) -> str:
    return orjson.dumps(value).decode()


def _halves() -> tuple[str, str]:
    """Our processors in two lists, as vLLM's CPU build takes them; both have a single one."""
    ours = [str(number) for number in sorted(os.sched_getaffinity(0))]
    half = max(1, len(ours) // 2)
    return ",".join(ours[:half]), ",".join(ours[half:] or ours)


async def _serves(session: aiohttp.ClientSession, engine: Child) -> bool:
    try:
        limit = aiohttp.ClientTimeout(total=HEALTH_S)
        async with session.get(f"{engine.http}/health", timeout=limit) as answer:
            return answer.status == 200
    except (TimeoutError, aiohttp.ClientError):
        return False


def _why_it_ended(children: Children, engine: Child) -> str:
    """The cause that an engine logged, which is above the end of its log."""
    causes = _CAUSE.findall(children.logged(engine))
    cause = f" ({causes[-1]})" if causes else ""
    tail = children.log_tail(engine)
    return f"{engine.name} ended during its start{cause}; its log ends:\n{tail}"
