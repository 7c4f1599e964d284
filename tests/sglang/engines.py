"""Starting and asking real SGLang engines on a CPU, with vLLM's small model."""

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from tests.fakes.patience import eventually
from tests.vllm.engines import Engine, EngineFailed, EngineOptions, ask
from tests.vllm.services import Service

STUBS = Path(__file__).parent / "stubs"
PAGE_TOKENS = 16
KV_TOKENS = 8000  # of an engine's own cache
PATIENCE_S = 60.0

StartEngine = Callable[..., Engine]


@dataclass(frozen=True)
class SglangOptions(EngineOptions):
    """How to start an engine of SGLang; `core`, `transfer` and `kv_bytes` are vLLM's alone.

    replay: the port at which it repeats KV events.
    """

    module: ClassVar[str] = "sglang.launch_server"

    block_tokens: int = PAGE_TOKENS
    kv_tokens: int = KV_TOKENS
    replay: int = 0

    def arguments(self, port: int) -> list[str]:
        """SGLang's command line."""
        words = [
            *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--disable-cuda-graph", "--skip-server-warmup"),
            *("--model-path", self.model, "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", port, "--context-length", self.max_tokens),
            *("--page-size", self.block_tokens, "--max-total-tokens", self.kv_tokens),
            *("--mem-fraction-static", "0.3", "--max-running-requests", "8"),
            *("--enable-metrics", "--enable-cache-report"),
            *("--load-snapshot-publish-interval", "1", *self.flags),
        ]
        if self.events:
            config = {"publisher": "zmq", "endpoint": self.events, "topic": f"kv@127.0.0.1:{port}"}
            if self.replay:
                config["replay_endpoint"] = f"tcp://127.0.0.1:{self.replay}"
            words += ["--kv-events-config", json.dumps(config)]
        return list(map(str, words))


def requests_of(engine: Engine) -> int:
    """Requests that its scheduler has, running, waiting, or in a transfer."""
    status, body = engine.get("/v1/loads")
    assert status == 200, body
    (load,) = json.loads(body)["loads"]
    queues = (load.get("disaggregation") or {}).items()
    waiting = sum(number for queue, number in queues if queue.endswith("_queue_reqs"))
    return int(load["num_running_reqs"] + load["num_waiting_reqs"] + waiting)


def until_idle(*engines: Engine) -> bool:
    """Whether the engines' requests go to none."""
    return eventually(lambda: not any(map(requests_of, engines)), PATIENCE_S, look_s=0.1)


def page_keys(tokens: Sequence[int]) -> list[str]:
    """The names of a prompt's pages, as SGLang's `get_hash_str` chains them."""
    keys, digest = list[str](), b""
    for at in range(0, len(tokens) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
        page = array("I", tokens[at : at + PAGE_TOKENS]).tobytes()
        digest = sha256(digest + page).digest()
        keys.append(digest.hex())
    return keys


def metric(of: Service | Engine, line: str) -> float:
    """The sum of its metrics that begin so."""
    page = ask(of.address, "GET", "/metrics", None, 10.0)[1].decode()
    return sum(float(row.rpartition(" ")[2]) for row in page.splitlines() if row.startswith(line))


def request_lines(router: Service, count: int) -> list[dict[str, Any]]:
    """The log lines of the router's last requests, once there are so many in all."""

    def lines() -> list[dict[str, Any]]:
        read = router.log.read_text(errors="replace").splitlines()
        found = (json.loads(line) for line in read if line.startswith("{"))
        return [line for line in found if line.get("path") == "/v1/completions"]

    if not eventually(lambda: len(lines()) >= count):
        raise EngineFailed(f"{router.name} has logged {len(lines())} of {count} requests")
    return lines()
