"""Starting, asking and stopping real vLLM engines. An engine belongs to who started it."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

READY_DEADLINE_S = 420.0  # a quiet machine needs 30 to 70
GPU_FLAGS = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.3")
"""Two engines share a GPU, whose attention kernels know no float32."""
ON_GPU = os.environ.get("KVROUTER_VLLM_DEVICE") == "cuda"
BLOCK_TOKENS = 32
HOST_BYTES = 128 << 20  # of an engine, for KV on its way
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}


class EngineFailed(Exception):
    """An engine did not start, or did not answer; the message holds the end of its log."""


def free_port() -> int:
    """A loopback port that nobody listened on just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def transfer_config(url: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """What --kv-transfer-config says to use the connector."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvrouter_store.connectors.vllm",
        "kv_role": role,
        "kv_connector_extra_config": {"url": url, "cpu_bytes_to_use": HOST_BYTES, **extra},
    }


@dataclass(frozen=True)
class EngineOptions:
    """How to start an engine: model folder, core to run on ('0', '1', '0|1'), further flags.

    block_tokens: 0 for what vLLM chooses.
    """

    module: ClassVar[str] = "vllm.entrypoints.openai.api_server"

    name: str
    model: Path
    core: str = "0"
    transfer: Mapping[str, Any] | None = None
    flags: Sequence[str] = ()
    block_tokens: int = BLOCK_TOKENS
    max_tokens: int = 4096
    kv_bytes: str = "64M"
    environment: Mapping[str, str] = field(default_factory=dict)
    events: str = ""  # where a router takes KV events: tcp://HOST:PORT

    def arguments(self, port: int) -> list[str]:
        """vLLM's command line."""
        words = [
            *("--model", str(self.model), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", str(self.max_tokens), "--enforce-eager", "--dtype", "float32"),
            *(("--block-size", str(self.block_tokens)) if self.block_tokens else ()),
            *("--kv-cache-memory-bytes", self.kv_bytes),
            *("--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details"),
            *self.flags,
            *(GPU_FLAGS if ON_GPU else ()),
        ]
        if self.transfer is not None:
            words += ["--kv-transfer-config", json.dumps(self.transfer)]
        if self.events:
            topic = f"kv@127.0.0.1:{port}"
            publish = {"enable_kv_cache_events": True, "publisher": "zmq"}
            config = {**publish, "endpoint": self.events, "topic": topic}
            words += ["--kv-events-config", json.dumps(config)]
        return words


class Engine:
    """A running engine. stop() ends it with all its processes."""

    def __init__(
        self,
        options: EngineOptions,
        port: int,
        process: subprocess.Popen[bytes],
        log: Path,
        begun: int,
    ) -> None:
        self.log = log
        self._begun = begun
        self.options = options
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://{self.address}"
        self.process = process

    @classmethod
    def start(
        cls, python: Path, options: EngineOptions, folder: Path, site: Path | None
    ) -> "Engine":
        """Start without waiting; the log is FOLDER/NAME.log. `site` goes onto its PYTHONPATH."""
        port = free_port()
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("KVROUTER")},
            **OFFLINE,
            "VLLM_CPU_OMP_THREADS_BIND": options.core,
            **({"PYTHONPATH": str(site)} if site is not None else {}),
            **options.environment,
        }
        path = folder / f"{options.name}.log"
        with path.open("ab") as log:
            begun = log.tell()
            process = subprocess.Popen(
                [python, "-m", options.module, *options.arguments(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        return cls(options, port, process, path, begun)

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> "Engine":
        """Return once /health answers 200. Raises EngineFailed with the log's end otherwise."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise EngineFailed(f"{self.options.name} ended at start:\n{self.tail()}")
            try:
                if self.get("/health", deadline_s=2.0)[0] == 200:
                    return self
            except OSError:
                time.sleep(0.25)
        raise EngineFailed(f"{self.options.name} was not ready in {deadline_s} s:\n{self.tail()}")

    def wait_refused(self, deadline_s: float = READY_DEADLINE_S) -> str:
        """Return the log of an engine that must end by itself at start."""
        try:
            self.process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise EngineFailed(f"{self.options.name} did not refuse:\n{self.tail()}") from error
        return self.said()

    def said(self) -> str:
        """What it has logged; earlier engines of its name wrote before it."""
        return self.log.read_bytes()[self._begun :].decode(errors="replace")

    def tail(self, lines: int = 40) -> str:
        """The end of the engine's log."""
        return "\n".join(self.said().splitlines()[-lines:])

    def get(self, path: str, deadline_s: float = 10.0) -> tuple[int, bytes]:
        """Status and body of a GET."""
        return ask(self.address, "GET", path, None, deadline_s)

    def post(self, path: str, deadline_s: float = 30.0) -> int:
        """The status of a POST without a body."""
        return ask(self.address, "POST", path, None, deadline_s)[0]

    def wait_log(self, text: str, times: int = 1, deadline_s: float = 30.0) -> None:
        """Return once the log holds the text so often. Raises EngineFailed otherwise."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            if self.said().count(text) >= times:
                return
            time.sleep(0.1)
        raise EngineFailed(f"{self.options.name} did not log {text!r}:\n{self.tail()}")

    def wait_store_back(self, deadline_s: float = 30.0) -> None:
        """Return once all parts of the engine that have lost the store have found it again."""
        until, text = time.monotonic() + deadline_s, ""
        while time.monotonic() < until:
            text = self.said()
            lost = text.count("the store is away, going on without it")
            if lost and lost == text.count("the store is back"):
                return
            time.sleep(0.1)
        told = "\n".join(line for line in text.splitlines() if "the store is " in line)
        raise EngineFailed(f"{self.options.name} lost the store for good:\n{told}")

    def complete(self, deadline_s: float = 120.0, **body: Any) -> dict[str, Any]:
        """A completion's answer. Raises EngineFailed on another status than 200."""
        status, answer = ask(
            self.address, "POST", "/v1/completions", {"model": "tiny", **body}, deadline_s
        )
        if status != 200:
            raise EngineFailed(f"{self.options.name} answered {status}: {answer[:500]!r}")
        parsed: dict[str, Any] = json.loads(answer)
        return parsed

    def counters(self) -> dict[str, float]:
        """The engine's counters: name{label="value",..} without vLLM's constant labels."""
        found: dict[str, float] = {}
        for line in self.get("/metrics")[1].decode().splitlines():
            if line.startswith("vllm:"):
                name, _, value = line.rpartition(" ")
                key = re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace(",}", "}")
                found[key.replace("{}", "")] = float(value)
        return found

    def wait_counter(self, name: str, value: float, deadline_s: float = 20.0) -> None:
        """Return once the engine's metric has this value."""
        until = time.monotonic() + deadline_s
        while (found := self.counters().get(name)) != value:
            assert time.monotonic() < until, f"{name} of {self.options.name} is {found}"
            time.sleep(0.2)

    def prompt_tokens(self) -> dict[str, int]:
        """Prompt tokens so far by where their KV came from, by vLLM's own counter."""
        pattern = re.compile(r'vllm:prompt_tokens_by_source_total\{source="(\w+)"\}')
        return {
            match[1]: int(value)
            for key, value in self.counters().items()
            if (match := pattern.fullmatch(key))
        }

    def stop(self, deadline_s: float = 15.0) -> None:
        """End the engine's session: first asked, then killed."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                break
            try:
                self.process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait(deadline_s)


def ask(  # noqa: PLR0917
    address: str,
    method: str,
    path: str,
    body: Any,
    deadline_s: float,
    key: str = "",
    request_id: str = "",
) -> tuple[int, bytes]:
    """One HTTP exchange on its own connection."""
    connection = http.client.HTTPConnection(address, timeout=deadline_s)
    shown = {"Authorization": f"Bearer {key}"} if key else {}
    shown |= {"X-Request-Id": request_id} if request_id else {}
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json", **shown})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@contextmanager
def running(engines: Sequence[Engine]) -> Iterator[None]:
    """Wait until all of them are ready; stop them at the end, whatever happened."""
    try:
        for engine in engines:
            engine.wait_ready()
        yield
    finally:
        with ThreadPoolExecutor(max(1, len(engines))) as pool:
            list(pool.map(Engine.stop, engines))


def host_and_port(url: str) -> str:
    """HOST:PORT of a URL."""
    return urlsplit(url).netloc
