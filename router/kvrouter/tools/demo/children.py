"""The processes of a demo. Each ends with the demo, in whatever way that ends. By pid only."""

import asyncio
import ctypes
import fcntl
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvrouter.tools.demo.settings import DemoSettings, child_environment

KVROUTER = (sys.executable, "-m", "kvrouter")
START_S = 20.0
STOP_S = 5.0
_LOG_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1
FOLDERS = "kvrouter-demo-"
LOCK = "lock"
MODEL = "demo-8b"
PREFILL = ("prefill-0", "prefill-1")  # names of the engines; the demo kills the first one
DECODE = ("decode-0", "decode-1")


class ChildFailed(Exception):
    """A process did not start; the message holds the end of its log."""


@dataclass(eq=False)
class Child:
    """A process that is ready. `urls` are those that it printed, by their scheme."""

    name: str
    process: asyncio.subprocess.Process
    urls: dict[str, str]
    killed: bool = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def http(self) -> str:
        """Where it serves HTTP."""
        return self.urls["http"]


def _dies_with(parent: int) -> Callable[[], None]:
    """For the child before it runs its program: it gets SIGKILL when the parent ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return tie


class Children:
    """Starts processes, each in a session of its own, and stops them all; an async context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Child] = []
        self._processes: list[asyncio.subprocess.Process] = []
        self._drains: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Children":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(
        self,
        name: str,
        *arguments: str,
        program: Sequence[str] = KVROUTER,
        start_s: float = START_S,
    ) -> Child:
        """Run `kvrouter ARGUMENTS`, or another `program`, until it prints its URLs.

        Raises ChildFailed if it ends before that, or takes longer than `start_s`.
        """
        with self._log(name).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(*program, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=child_environment(),
                start_new_session=True,
                preexec_fn=_dies_with(os.getpid()),
            )
        self._processes.append(process)
        try:
            async with asyncio.timeout(start_s):
                urls = await _printed_urls(process)
        except TimeoutError:
            urls = {}
        if not urls:
            raise ChildFailed(f"{name} did not start:\n{_tail(self._log(name))}")
        child = Child(name, process, urls)
        self._started.append(child)
        self._drains.append(asyncio.create_task(_drain(process)))
        return child

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def log_tail(self, child: Child) -> str:
        """The end of what a process logged."""
        return _tail(self._log(child.name))

    def logged(self, child: Child) -> str:
        """All that a process logged."""
        return self._log(child.name).read_text(errors="replace")

    def unexpected_deaths(self) -> Sequence[str]:
        """Names of processes that ended although `kill` did not end them."""
        return [
            child.name
            for child in self._started
            if child.process.returncode is not None and not child.killed
        ]

    async def kill(self, child: Child) -> None:
        """SIGKILL, as at a loss of power; returns when the process is gone."""
        child.killed = True
        await _end(child.process)

    async def stop(self) -> None:
        """End all processes, the last one first, and wait until they are gone."""
        for process in reversed(self._processes):
            if process.returncode is None:
                process.terminate()
        await _gone(self._processes)
        for process in self._processes:
            await _end(process)
        for drain in self._drains:
            drain.cancel()
        await asyncio.gather(*self._drains, return_exceptions=True)


async def _gone(processes: Sequence[asyncio.subprocess.Process]) -> None:
    """Return when all have ended, or after STOP_S."""
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            await asyncio.gather(*(process.wait() for process in processes))


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGKILL for what is left of a process and its session; returns when it is gone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads its session
    await process.wait()


async def _printed_urls(process: asyncio.subprocess.Process) -> dict[str, str]:
    """The URLs on the first line that has any; {} if the process ended before."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        found = re.findall(r"\b(https?|kvs?)(://[\w.\[\]:-]+:\d+)", line.decode(errors="replace"))
        if found:
            return {scheme: scheme + rest for scheme, rest in found}
    return {}


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    while await process.stdout.read(65536):
        continue


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  (it logged nothing)"


@dataclass
class Cluster:
    """The running processes; engines by their names."""

    store: Child
    engines: dict[str, Child]
    router: Child


async def start_cluster(children: Children, folder: Path, settings: DemoSettings) -> Cluster:
    """Start store, engines and router on free ports, one after the other. Raises ChildFailed."""
    store = await start_store(children, folder, "256MiB")
    events, names = f"tcp://127.0.0.1:{free_port()}", (*PREFILL, *DECODE)
    flags = engine_flags(settings, store.urls["kv"], events)
    started = await asyncio.gather(
        *(children.start(name, "sim", "--role", name.split("-")[0], *flags) for name in names)
    )
    engines = dict(zip(names, started, strict=True))
    prefill, decode = ([engines[name].http for name in role] for role in (PREFILL, DECODE))
    control = free_port()
    router = await children.start(
        "router",
        *("serve", "--port", str(settings.port), "--store", store.urls["kv"]),
        *("--prefill", *prefill, "--decode", *decode),
        *("--kv-events-bind", events, "--log-level", "warning", "--control-port", str(control)),
    )
    router.urls["page"] = f"http://127.0.0.1:{control}"
    return Cluster(store, engines, router)


async def start_store(children: Children, folder: Path, memory: str) -> Child:
    """A store node on free loopback ports."""
    return await children.start(
        "store",
        *("store", "--port", "0", "--http-port", "0", "--memory", memory),
        *("--unix-socket", str(folder / "store.sock")),
    )


def engine_flags(settings: DemoSettings, store: str, events: str) -> tuple[str, ...]:
    """The flags of every engine, which publishes its KV events to `events`."""
    prefill_time = f"{settings.prefill_time_per_token_us}us"
    return (
        *("--port", "0", "--model", MODEL, "--store", store),
        *("--kv-events-endpoint", events, "--prefill-time-per-token", prefill_time),
        *("--inter-token-latency", "5ms"),
    )


def free_port() -> int:
    """A loopback port on which no process listens.

    It is below the ports that Linux usually gives to outgoing connections, so none of these takes
    it meanwhile. Raises ChildFailed if none is free.
    """
    for port in random.sample(range(10_000, 32_768), 1_000):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise ChildFailed("no port between 10000 and 32767 is free on 127.0.0.1")


@contextmanager
def demo_folder() -> Iterator[Path]:
    """A new temporary folder for the time of the context. Removes those of dead demos first.

    A demo holds a lock (flock(2)) on a file in its folder. The kernel releases it when the process
    ends in any way.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        with suppress(OSError):
            _remove_if_dead(folder)
    with tempfile.TemporaryDirectory(prefix=FOLDERS) as name:
        folder = Path(name)
        with (folder / f"{LOCK}.new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / LOCK)  # never visible under this name without its lock
            yield folder


def _remove_if_dead(folder: Path) -> None:
    """Raises OSError if the folder has no lock, or a living demo holds it."""
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        return
    descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)
