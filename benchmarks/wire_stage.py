"""The processes of the wire benchmark: mock engines, the store with their KV, routers, peers.

Our router and the peers have the same engines and the same load; peers get texts of the same size
instead of token ids.
"""

import asyncio
import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import sub
from pathlib import Path

from benchmarks import peers
from benchmarks.wire_prompts import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    MARK,
    SHAPES,
    SIZES,
    KvEvents,
    Prompt,
    Shape,
    fill_store,
    manifest,
    prompts,
)
from benchmarks.wire_rig import (
    Cores,
    Process,
    ask,
    compile_native,
    cpu_s,
    kvrouter,
    loop_ms,
    on_core,
)
from benchmarks.wire_saver import Saver
from benchmarks.wire_text import TextTokenizer
from kvrouter.tools.demo.cluster import free_port

PREFILL, DECODE = 2, 2  # engines
STORE_MEMORY = "512MiB"
CONNECTOR = ("--kv-connector", "store")
"""Flags of our routers: the mocks answer for several families, so that the peer takes them too."""
PEERS = {"sglang-router": peers.SGLANG_ROUTER, "smg": peers.SMG}
TRICKLE_S = 0.05
IDLE_DEADLINE_S, IDLE_LOOK_S, IDLE_SHARE = 8.0, 0.1, 0.2
MOST_TOGETHER = 50_000  # requests of one sample, where another one is taken at the same time


@dataclass(frozen=True)
class Scene:
    """What every process is started with."""

    stack: ExitStack  # ends it
    folder: Path  # its output
    cores: Cores


@dataclass(frozen=True)
class Router:
    """A router under test."""

    process: Process
    port: int


@dataclass(frozen=True)
class Load:
    """A router to load, the API key of every request, and the percentage of clients that leave."""

    router: Router
    key: str = ""
    leave_percent: int = 0


@dataclass(frozen=True)
class Answers:
    """One sample: counts of the load generator, and the CPU seconds meanwhile."""

    seconds: float
    answered: int
    left: int
    events: int
    latency_p50_us: float
    first_event_p50_us: float
    router_s: float
    store_s: float


@dataclass
class Stage:
    """All running processes, and how to load them."""

    engines: list[str]  # HOST:PORT
    store: Process
    store_url: str
    store_http: str  # http://HOST:PORT
    load_program: Path
    tokenizer: TextTokenizer | None
    prefix: Router
    least_tokens: Router
    peers: list[Router]
    notes: list[str]
    router_core: int
    sent: int = 0  # numbers of requests so far: none is used twice
    loops_ms: list[float] = field(default_factory=list)  # of a fixed loop, before each sample

    def load(
        self,
        router: Router,
        bodies: Path,
        connections: int,
        seconds: float,
        pace_per_s: int = 0,
        *,
        key: str = "",
        leave_percent: int = 0,
    ) -> Answers:
        """One sample: a closed loop, or (with a pace) one paced stream for each connection.

        With `key` every request has that API key; `leave_percent` of the clients leave before the
        end of their answer.

        Raises:
            RuntimeError: a request failed; figures of failing requests mean nothing.
        """
        load = Load(router, key, leave_percent)
        return self.load_together([load], bodies, connections, seconds, pace_per_s)[0]

    def load_together(
        self,
        loads: Sequence[Load],
        bodies: Path,
        connections: int,
        seconds: float,
        pace_per_s: int = 0,
        *,
        rest_s: float = 0.0,
    ) -> list[Answers]:
        """One sample of each router, all at the same time; otherwise as `load`.

        `rest_s`: seconds after the load that still count.
        """
        if pace_per_s:
            self._set_pace(pace_per_s)
        for load in loads:
            _await_idle(load.router)
        self.loops_ms.append(loop_ms(self.router_core))
        before = [cpu_s(load.router.process.pid) for load in loads], cpu_s(self.store.pid)
        running = []
        for load in loads:
            command = [str(self.load_program), "-p", str(load.router.port), "-c", str(connections)]
            command += ["-t", str(seconds), "-s", str(self.sent), *(["-1"] if pace_per_s else [])]
            command += [*(["-k", load.key] if load.key else [])]
            command += ["-l", str(load.leave_percent), str(bodies)]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            self.sent += MOST_TOGETHER
        reports = [one.communicate()[0] for one in running]
        time.sleep(rest_s)
        after = [cpu_s(load.router.process.pid) for load in loads], cpu_s(self.store.pid)
        found = [
            _answers(load, bodies, text, router_s, after[1] - before[1])
            for load, text, router_s in zip(
                loads, reports, map(sub, after[0], before[0]), strict=True
            )
        ]
        sent = [answers.answered + answers.left + connections for answers in found]
        self.sent += sent[-1] - MOST_TOGETHER
        if any(each > MOST_TOGETHER for each in sent[:-1]):
            raise RuntimeError(f"more than {MOST_TOGETHER} requests in one sample: make it shorter")
        return found

    def _set_pace(self, pace_per_s: int) -> None:
        url = f"http://{self.engines[0]}/gap/{1_000_000 // pace_per_s}"
        with urllib.request.urlopen(url, timeout=5):
            pass


def _answers(load: Load, bodies: Path, reports: str, router_s: float, store_s: float) -> Answers:
    """The report of a load generator.

    Raises:
        RuntimeError: a request failed; figures of failing requests mean nothing.
    """
    counted = json.loads(reports or '{"answered": 0, "failed": "unknown"}')
    if counted["failed"] or not counted["answered"]:
        name, log = load.router.process.name, load.router.process.output()[-1500:]
        raise RuntimeError(f"{name} failed under {bodies.name}: {counted}\n{log}")
    return Answers(
        seconds=counted["seconds"],
        answered=counted["answered"],
        left=counted["left"],
        events=counted["events"],
        latency_p50_us=counted["latency_p50_us"],
        first_event_p50_us=counted["first_event_p50_us"],
        router_s=router_s,
        store_s=store_s,
    )


def _await_idle(router: Router) -> None:
    """Wait until the router has finished the requests of an earlier sample."""
    deadline = time.monotonic() + IDLE_DEADLINE_S
    while time.monotonic() < deadline:
        before = cpu_s(router.process.pid)
        time.sleep(IDLE_LOOK_S)
        if cpu_s(router.process.pid) - before < IDLE_SHARE * IDLE_LOOK_S:
            return


@contextmanager
def set_stage(
    folder: Path,
    *,
    with_peers: bool = True,
    options: Sequence[str] = (),
    store_memory: str = STORE_MEMORY,
    more: Sequence[Prompt] = (),
) -> Iterator[Stage]:
    """Start all processes, with the KV of every prompt in the store; end them with the context.

    Args:
        folder: for output and sockets.
        with_peers: whether to start the peers.
        options: more flags of our routers.
        store_memory: size of the store's pool. Each request puts one block.
        more: prompts whose KV is in the store too, beside those of all `SIZES`.
    """
    with ExitStack() as stack:
        scene = Scene(stack, folder, Cores.pick())
        stack.enter_context(on_core(scene.cores.rest))
        load = compile_native("load", folder)
        saver = stack.enter_context(Saver())
        engines = stack.enter_context(_engines(scene, saver.port))
        store, store_url, store_http = _store(scene, store_memory)
        notes: list[str] = []
        tokenizer = _tokenizer(folder, notes)
        sizes = SIZES.values()
        asked = [p for size in sizes for shape in SHAPES for p in prompts(shape, size)] + [*more]
        chains = [prompt.tokens for prompt in asked if prompt.tokens]
        fill_store(store_url, chains)
        saver.start(store_url, asked)
        local = ["--tokenizer", str(tokenizer.path)] if tokenizer else []
        prefix, events_url = _ours(
            scene, engines, store_url, ["--policy", "prefix", *local, *options]
        )
        least_tokens, _ = _ours(scene, engines, store_url, ["--policy", "least_tokens"])
        stack.enter_context(_kv_events(events_url, engines, chains))
        found = _peers(scene, engines, notes) if with_peers else []
        stage = Stage(
            engines,
            store,
            store_url,
            store_http,
            load,
            tokenizer,
            prefix,
            least_tokens,
            found,
            notes,
            router_core=scene.cores.router,
        )
        _check(stage)
        yield stage


def _tokenizer(folder: Path, notes: list[str]) -> TextTokenizer | None:
    try:
        return TextTokenizer(folder)
    except ImportError:
        notes.append("no tokenizers package: the mock engines tokenise, at a price of nothing")
        return None


@contextmanager
def _engines(scene: Scene, saver_port: int) -> Iterator[list[str]]:
    program = compile_native("mock", scene.folder)
    mock = manifest()
    command = [str(program), "-k", mock.digest.hex(), "-r", mock.spec.root]
    command += ["-t", str(BLOCK_TOKENS), "-n", str(saver_port), str(PREFILL), str(DECODE)]
    with Process("mock", command, scene.cores.rest, scene.folder) as process:
        ports = process.await_output("\n").split()
        yield [f"127.0.0.1:{port}" for port in ports]


def _store(scene: Scene, memory: str) -> tuple[Process, str, str]:
    port, http_port = free_port(), free_port()
    command = kvrouter("store", "--port", str(port), "--http-port", str(http_port))
    command += [
        "--memory",
        memory,
        "--granule",
        str(BLOCK_BYTES),
        "--unix-socket",
        str(scene.folder / "store.sock"),
    ]
    store = scene.stack.enter_context(Process("store", command, scene.cores.rest, scene.folder))
    http = f"http://127.0.0.1:{http_port}"
    store.await_answer(f"{http}/healthz")
    return store, f"kv://127.0.0.1:{port}", http


def _ours(scene: Scene, engines: list[str], store: str, options: list[str]) -> tuple[Router, str]:
    port, events = free_port(), f"tcp://127.0.0.1:{free_port()}"
    command = kvrouter("serve", "--port", str(port), "--store", store, *options)
    command += ["--prefill", *engines[:PREFILL], "--decode", *engines[PREFILL:]]
    command += [*CONNECTOR, "--kv-events-bind", events]
    process = scene.stack.enter_context(
        Process(options[1], command, scene.cores.router, scene.folder)
    )
    process.await_answer(f"http://127.0.0.1:{port}/health")
    return Router(process, port), events


def _peers(scene: Scene, engines: list[str], notes: list[str]) -> list[Router]:
    found = []
    for name, peer in PEERS.items():
        try:
            found.append(_peer(scene, engines, name, peer))
        except RuntimeError as error:
            notes.append(f"{name} is missing, so that its bars are false: {error}")
    return found


def _peer(scene: Scene, engines: list[str], name: str, peer: peers.Peer) -> Router:
    python = peers.install(peer)
    port, metrics_port = free_port(), free_port()
    command = [str(python), "-m", peer.module, "--pd-disaggregation"]
    for engine in engines[:PREFILL]:
        command += ["--prefill", f"http://{engine}"]
    for engine in engines[PREFILL:]:
        command += ["--decode", f"http://{engine}"]
    command += ["--policy", "cache_aware", "--worker-startup-check-interval", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    process = scene.stack.enter_context(Process(name, command, scene.cores.router, scene.folder))
    router = Router(process, port)
    body = prompts("text", SIZES["short"])[0].body
    process.await_true(lambda: _asked(router, body))
    return router


@contextmanager
def _kv_events(url: str, engines: list[str], chains: list[list[int]]) -> Iterator[None]:
    """Publish all prompts once, then new blocks all the time, as working engines do."""
    stop = threading.Event()

    async def publish() -> None:
        events = KvEvents(url, engines)
        try:
            await asyncio.sleep(0.5)  # a subscriber joins late; what is lost before is lost in life
            events.announce(chains)
            while not stop.is_set():
                await asyncio.sleep(TRICKLE_S)
                events.trickle()
        finally:
            events.close()

    thread = threading.Thread(target=asyncio.run, args=(publish(),), name="kv-events")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _asked(router: Router, body: str) -> bool:
    try:
        ask(f"http://127.0.0.1:{router.port}/v1/completions", body.replace(MARK, "9" * len(MARK)))
    except OSError:
        return False
    return True


def check_legs(router: Router) -> None:
    """Check that the router sends both legs and awaits landings."""
    with urllib.request.urlopen(f"http://127.0.0.1:{router.port}/metrics", timeout=5) as answer:
        page = answer.read().decode()
    for row in ('kvrouter:plans_total{why="prefill"}', 'kvrouter:landings_total{outcome="landed"}'):
        if row not in page:
            raise RuntimeError(f"{router.process.name} has no {row}: it sends one leg alone")


def _check(stage: Stage) -> None:
    """Send one request of each shape through each router, before the measurement."""
    shapes: list[tuple[Router, Shape]] = [
        (stage.prefix, "ids"),
        (stage.prefix, "text"),
        (stage.least_tokens, "text"),
    ]
    for router, shape in shapes:
        if not _asked(router, prompts(shape, SIZES["8 KiB"])[0].body):
            log = router.process.output()[-2000:]
            raise RuntimeError(f"{router.process.name} refuses a {shape} prompt: {log}")
        check_legs(router)
    for peer in stage.peers:
        takes = "takes" if _asked(peer, prompts("ids", SIZES["short"])[0].body) else "refuses"
        stage.notes.append(f"{peer.process.name} {takes} token ids; its cells are of text")
