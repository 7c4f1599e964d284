"""Engines of one sitting: starting them, asking them one at a time, and seeing that others idle."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from aiohttp import ClientError
from tests.fakes.patience import eventually
from tests.vllm.engines import Engine, EngineFailed, EngineOptions
from tests.vllm.install import install_into
from tests.vllm.models import MID, model_folder
from tests.vllm.services import Service

from benchmarks.connectors.peers import Joined
from benchmarks.offloading.rig import Wrong, ask_all
from benchmarks.wire_rig import family, share_of_core

BLOCK_TOKENS = 64
MAX_TOKENS = 4096
KV_TOKEN_BYTES = 16 << 10  # of MID: 8 layers, 4 heads of keys and of values, 64 floats
KV_BYTES = "512M"  # of an engine's own cache; it holds every prompt that is asked again
OUTPUT_TOKENS, SALT = 4, "connectors"
TICK_S, SETTLE_S, IDLE_S = 0.1, 3.0, 2.0
IDLE_SHARE = 0.3  # of one core, all engines together
RESUME_S = 60.0
SPINNING_SHARE, LOWEST_PRIORITY = 0.1, 19


@dataclass(frozen=True)
class Answer:
    """Time to the first token, all tokens, and prompt tokens by the source of their KV."""

    ttft_s: float
    tokens: list[int]
    sources: dict[str, int]  # as vllm:prompt_tokens_by_source_total names them


@dataclass(frozen=True)
class Setup:
    """What answers requests: its address, its engines (the last one decodes), its router."""

    name: str
    engines: tuple[Engine, ...]
    router: Service | None = None
    store: Service | None = None
    spins: bool = False

    def ask(self, prompt: list[int], idle: Sequence[Engine] = ()) -> Answer:
        """Send one prompt once the engines of `idle` are, and wait for the whole answer."""
        decode = self.engines[-1]
        address = self.router.address if self.router else decode.address
        with self._awake():
            before = decode.prompt_tokens()
            settle(idle)
            try:
                (told,) = asyncio.run(ask_all(address, [prompt], OUTPUT_TOKENS, cache_salt=SALT))
            except (Wrong, ClientError) as error:
                raise EngineFailed(f"{self.name}: {error}") from error
            after = decode.prompt_tokens()
        sources = {key: after[key] - before.get(key, 0) for key in after}
        return Answer(told.ttft_s, told.tokens, sources)

    def forget(self) -> None:
        """Reset the engine's own prefix cache; what is outside the engine stays."""
        settle(self.engines)
        for engine in self.engines:
            if (status := engine.post("/reset_prefix_cache")) != 200:
                raise EngineFailed(f"{self.name}: /reset_prefix_cache answered {status}")

    def bytes_read(self) -> int:
        """Bytes that the store has given to readers so far."""
        if self.store is None:
            return 0
        counted = self.store.stats().items()
        return sum(value for key, value in counted if key.startswith("bytes_out_total"))

    def pause(self) -> None:
        """Stop the engines, if they spin while idle, until they are asked again."""
        if self.spins:
            for engine in self.engines:
                os.killpg(engine.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let stopped engines run on."""
        for engine in self.engines:
            if engine.process.poll() is None:
                os.killpg(engine.process.pid, signal.SIGCONT)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        if self.spins:
            self.resume()
            for engine in self.engines:
                engine.get("/health", RESUME_S)
        try:
            yield
        finally:
            self.pause()


def settle(engines: Sequence[Engine]) -> None:
    """Wait until engines hardly use the CPU, for SETTLE_S at most: what they save late is saved."""
    pids = [engine.process.pid for engine in engines]
    eventually(lambda: share_of_core(pids, TICK_S) <= IDLE_SHARE, SETTLE_S)


def tame_spinners(engines: Sequence[Engine]) -> int:
    """Give the lowest priority to threads that spin in idle engines; returns how many.

    Pinned threads return to the core of their engine: vLLM's NixlConnector moves computation to the
    machine's last core, where the other engine's thread spins.
    """
    before_s = _threads_cpu_s(engines)
    time.sleep(IDLE_S)
    spinning = [
        thread
        for thread, used_s in _threads_cpu_s(engines).items()
        if used_s - before_s.get(thread, used_s) > IDLE_S * SPINNING_SHARE
    ]
    for thread in spinning:
        os.setpriority(os.PRIO_PROCESS, thread, LOWEST_PRIORITY)
    for engine in engines:
        for thread in _threads_cpu_s([engine]):
            with suppress(OSError):  # it ended meanwhile
                if len(os.sched_getaffinity(thread)) == 1:
                    os.sched_setaffinity(thread, {int(engine.options.core)})
    return len(spinning)


def _threads_cpu_s(engines: Sequence[Engine]) -> dict[int, float]:
    """CPU seconds so far of each thread of the engines."""
    found = {}
    for pid in chain.from_iterable(family(engine.process.pid) for engine in engines):
        for used in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # it ended meanwhile
                found[int(used.parent.name)] = int(used.read_text().split()[0]) / 1e9
    return found


@dataclass
class Rig:
    """Starts engines with the same flags; they end with `stack`."""

    python: Path
    folder: Path
    stack: ExitStack
    max_tokens: int = MAX_TOKENS
    kv_bytes: str = KV_BYTES
    model: Path = field(init=False)
    site: Path | None = field(init=False)

    def __post_init__(self) -> None:
        self.model = model_folder(MID, self.python)
        self.site = install_into(self.python)

    def engine(self, name: str, core: str, joined: Joined) -> Engine:
        """Start an engine on one core without waiting for it."""
        paths = [*joined.paths, *([str(self.site)] if self.site else [])]
        options = EngineOptions(
            name,
            self.model,
            core=core,
            transfer=joined.transfer or None,
            block_tokens=BLOCK_TOKENS,
            max_tokens=self.max_tokens,
            kv_bytes=self.kv_bytes,
            environment={
                "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
                "PYTHONPATH": os.pathsep.join(paths),
                **joined.environment,
            },
        )
        engine = Engine.start(self.python, options, self.folder, None)
        self.stack.callback(engine.stop)
        return engine
