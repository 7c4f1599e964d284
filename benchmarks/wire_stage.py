"""The processes of the wire benchmark: mock engines, the store with their KV, routers, peers.

Our router and the peers have the same engines and the same load; peers get texts of the same size
instead of token ids.
"""

import asyncio
import json
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from tests.fakes.patience import eventually
from tests.fakes.store import StoreProcess

from benchmarks import peers_setup
from benchmarks.wire_prompts import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    MARK,
    SHAPES,
    SIZES,
    Prompt,
    Saver,
    Shape,
    TextTokenizer,
    fill_store,
    manifest,
    prompts,
    stored,
)
from benchmarks.wire_rig import (
    Cores,
    Process,
    ask,
    compile_native,
    cpu_s,
    loop_ms,
    on_core,
    share_of_core,
)
from kvrouter.tools.demo.children import KVROUTER, free_port
from kvrouter.tools.sim.events import EventPublisher

PREFILL, DECODE = 2, 2  # engines
STORE_MEMORY = "512MiB"
CONNECTOR = ("--kv-connector", "store")
"""Flags of our routers: the mocks answer for several families, so that the peer takes them too."""
PEERS = {"sglang-router": peers_setup.SGLANG_ROUTER, "smg": peers_setup.SMG}
TRICKLE_S = 0.05
IDLE_DEADLINE_S, IDLE_LOOK_S, IDLE_SHARE = 8.0, 0.1, 0.2


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
class Answers:
    """One sample: counts of the load generator, and the CPU seconds meanwhile."""

    seconds: float
    answered: int
    events: int
    latency_p50_us: float
    first_event_p50_us: float
    router_s: float
    store_s: float


@dataclass
class Stage:
    """All running processes, and how to load them."""

    engines: list[str]  # HOST:PORT
    store: StoreProcess
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
    ) -> Answers:
        """One sample: a closed loop, or (with a pace) one paced stream for each connection.

        Raises:
            RuntimeError: a request failed; figures of failing requests mean nothing.
        """
        if pace_per_s:
            self.set_gap(1_000_000 // pace_per_s)
        _await_idle(router)
        self.loops_ms.append(loop_ms(self.router_core))
        command = [str(self.load_program), "-p", str(router.port), "-c", str(connections)]
        command += ["-t", str(seconds), "-s", str(self.sent), *(["-1"] if pace_per_s else [])]
        command.append(str(bodies))
        router_s, store_s = cpu_s(router.process.pid), cpu_s(self.store.pid)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        router_s, store_s = cpu_s(router.process.pid) - router_s, cpu_s(self.store.pid) - store_s
        answers = _answers(router, bodies, done.stdout, router_s, store_s)
        self.sent += answers.answered + connections
        return answers

    def set_gap(self, gap_us: int) -> None:
        """Let the engines wait so long between the events of a stream."""
        urllib.request.urlopen(f"http://{self.engines[0]}/gap/{gap_us}", timeout=5).close()


def _answers(router: Router, bodies: Path, told: str, router_s: float, store_s: float) -> Answers:
    """The report of the load generator. RuntimeError: a request failed."""
    counted = json.loads(told or '{"answered": 0, "failed": "unknown"}')
    if counted["failed"] or not counted["answered"]:
        name, log = router.process.name, router.process.output()[-1500:]
        raise RuntimeError(f"{name} failed under {bodies.name}: {counted}\n{log}")
    del counted["failed"]
    return Answers(**counted, router_s=router_s, store_s=store_s)


def _await_idle(router: Router) -> None:
    """Wait until the router has finished the requests of an earlier sample."""
    pids = [router.process.pid]
    eventually(lambda: share_of_core(pids, IDLE_LOOK_S) < IDLE_SHARE, IDLE_DEADLINE_S)


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
        store = StoreProcess(folder, store_memory, "--granule", str(BLOCK_BYTES))
        stack.enter_context(store)
        notes: list[str] = []
        tokenizer = _tokenizer(folder, notes)
        sizes = SIZES.values()
        asked = [p for size in sizes for shape in SHAPES for p in prompts(shape, size)] + [*more]
        chains = [prompt.tokens for prompt in asked if prompt.tokens]
        fill_store(store.url, chains)
        saver.start(store.url, asked)
        local = ["--tokenizer", str(tokenizer.path)] if tokenizer else []
        policy = ["--policy", "prefix", *local, *options]
        prefix, events_url = _ours(scene, engines, store.url, policy)
        least_tokens, _ = _ours(scene, engines, store.url, ["--policy", "least_tokens"])
        stack.enter_context(_kv_events(events_url, engines, chains))
        found = _peers(scene, engines, notes) if with_peers else []
        stage = Stage(
            engines,
            store,
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
    with Process("mock", command, [scene.cores.rest], scene.folder) as process:
        ports = process.await_output("\n").split()
        yield [f"127.0.0.1:{port}" for port in ports]


def _ours(scene: Scene, engines: list[str], store: str, options: list[str]) -> tuple[Router, str]:
    port, events = free_port(), f"tcp://127.0.0.1:{free_port()}"
    command = [*KVROUTER, "serve", "--port", str(port), "--store", store, *options]
    command += ["--prefill", *engines[:PREFILL], "--decode", *engines[PREFILL:]]
    command += [*CONNECTOR, "--kv-events-bind", events]
    process = scene.stack.enter_context(
        Process(options[1], command, [scene.cores.router], scene.folder)
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


def _peer(scene: Scene, engines: list[str], name: str, peer: peers_setup.Peer) -> Router:
    python = peers_setup.install(peer)
    port, metrics_port = free_port(), free_port()
    command = [str(python), "-m", peer.module, "--pd-disaggregation"]
    for engine in engines[:PREFILL]:
        command += ["--prefill", f"http://{engine}"]
    for engine in engines[PREFILL:]:
        command += ["--decode", f"http://{engine}"]
    command += ["--policy", "cache_aware", "--worker-startup-check-interval", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    process = scene.stack.enter_context(Process(name, command, [scene.cores.router], scene.folder))
    router = Router(process, port)
    body = prompts("text", SIZES["short"])[0].body
    process.await_true(lambda: _asked(router, body))
    return router


@contextmanager
def _kv_events(url: str, engines: list[str], chains: list[list[int]]) -> Iterator[None]:
    """Publish all prompts, each from one of the engines; then, as working engines do, new blocks.

    In a thread, until the end of the context.
    """
    stop = threading.Event()

    async def publish() -> None:
        names = [f"kv@{engine}" for engine in engines]
        publishers = [EventPublisher(url, name, BLOCK_TOKENS) for name in names]
        await asyncio.sleep(0.5)  # a subscriber joins late; what is lost before is lost in life
        for tokens, publisher in zip(chains, cycle(publishers)):
            publisher.publish([stored(tokens)])
        number = 0
        while not stop.is_set():
            await asyncio.sleep(TRICKLE_S)
            number += 1
            for publisher in publishers:
                publisher.publish([stored([number % 50_000] * BLOCK_TOKENS)])
        for publisher in publishers:
            publisher.close()

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
