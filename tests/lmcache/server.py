"""LMCache's multiprocess servers with our adapter below them, and the engines on them."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lmcache.process import plugin
from tests.vllm.asking import Answer, Question, answer
from tests.vllm.engines import OFFLINE, Engine, EngineOptions, ask, free_port
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service

CHUNK_TOKENS = 64
QUIET = {**OFFLINE, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


def own_environment() -> dict[str, str]:
    """For processes of LMCache: nothing of it leaves this machine."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVROUTER")}
    site = os.environ.get("KVROUTER_VLLM_SITE")
    return {**kept, **QUIET, **({"PYTHONPATH": site} if site else {})}


@dataclass
class Server:
    """An LMCache server, and the engine on it."""

    service: Service
    port: int
    engine: Engine | None = None

    def status(self) -> dict[str, Any]:
        """Of its adapter, by LMCache's /status."""
        status, body = ask(self.service.http, "GET", "/status", None, 10.0)
        assert status == 200
        (found,) = json.loads(body)["storage_manager"]["l2_adapters"]
        assert isinstance(found, dict)
        return found

    def ask(self, question: Question) -> Answer:
        """Have its engine answer."""
        assert self.engine is not None
        return answer(self.engine.address, question)


def start_lmcache(
    name: str, python: Path, environment: dict[str, str], folder: Path, words: Sequence[Any]
) -> Service:
    """`lmcache WORDS`, in this environment alone; the log is FOLDER/NAME.log."""
    given = [f"{key}={value}" for key, value in environment.items()]
    command = ["env", "-i", *given, python, "-m", "lmcache.cli.main", *words]
    return Service.start(name, command, folder)


def start_coordinator(
    python: Path, environment: dict[str, str], folder: Path, chunk_tokens: int, port: int = 0
) -> Service:
    """The coordinator of servers; it may not be ready yet."""
    port = port or free_port()
    words = [
        *("coordinator", "--host", "127.0.0.1", "--port", port),
        *("--chunk-size", chunk_tokens, "--disable-metrics"),
    ]
    service = start_lmcache("coordinator", python, environment, folder, words)
    service.http = f"127.0.0.1:{port}"
    return service


def start_server(
    name: str,
    python: Path,
    environment: dict[str, str],
    url: str,
    folder: Path,
    *,
    flags: Sequence[Any] = ("--disable-observability",),
) -> Server:
    """A server above the store node at `url`; it may not be ready yet."""
    port, http_port = free_port(), free_port()
    words = [
        *("server", "--host", "127.0.0.1", "--port", port),
        *("--http-host", "127.0.0.1", "--http-port", http_port),
        *("--chunk-size", CHUNK_TOKENS, "--l1-size-gb", "0.25", "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "engine_driven"),
        *("--l2-adapter", json.dumps(plugin(url=url)), *flags),
    ]
    service = start_lmcache(name, python, environment, folder, words)
    service.http = f"127.0.0.1:{http_port}"
    return Server(service, port)


def transfer_config(port: int) -> dict[str, Any]:
    """The --kv-transfer-config of an engine on the server at that port."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
        },
    }


def start_engine(
    server: Server, core: str, python: Path, environment: dict[str, str], folder: Path
) -> Engine:
    """An engine on the server, on that core; it may not be ready yet."""
    options = EngineOptions(
        f"{server.service.name}-engine",
        model_folder(TINY, python),
        core,
        transfer_config(server.port),
        environment={**environment, "PYTHONHASHSEED": "0"},
    )
    server.engine = Engine.start(python, options, folder, None)
    return server.engine
