"""Real nodes of the store that publish what they hold, and what routers know of it."""

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import zmq
import zmq.asyncio
from tests.fakes.mooncake import free_ports
from tests.fakes.patience import every, until
from tests.fakes.store import RUN, StoreProcess, chain_of, manifest_of, put_chain
from tests.unit.router.conftest import Clock

from kvrouter.engines.engine import CacheGroup
from kvrouter.prefix.events.confidence import Reason
from kvrouter.prefix.stores.node import NodesView
from kvrouter.prefix.stores.node_index import RELEARN_S, NodeIndex
from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.events.publisher import COUNT_BITS
from kvrouter_store.identity.block import Manifest

Json = dict[str, Any]
MANIFEST, OTHER = manifest_of(64), manifest_of(128)
BLOCKS = 12
CHAIN = chain_of(BLOCKS)
PATIENCE_S = 20.0
NODE = (
    *(sys.executable, "-c", RUN, "--port", "0", "--http-port", "0"),
    *("--memory", "16MiB", "--unix-socket", "none"),
)


@dataclass
class Node:
    """A node and the ports of its events."""

    process: StoreProcess
    port: int
    replay_port: int

    @property
    def url(self) -> str:
        return self.process.url

    async def put(self, chain: bytes, manifest: Manifest = MANIFEST) -> None:
        await asyncio.to_thread(self._put, chain, manifest)

    def _put(self, chain: bytes, manifest: Manifest) -> None:
        with StoreClient(self.url) as client:
            client.register(manifest)
            if chain:
                put_chain(client, manifest, chain)

    async def delete(self, chain: bytes) -> None:
        def delete() -> None:
            with StoreClient(self.url) as client:
                client.delete(MANIFEST, chain)

        await asyncio.to_thread(delete)


Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts nodes that publish."""
    with ExitStack() as stack:
        made: list[Node] = []

        def begin(*flags: str, buffer_steps: int = 1000) -> Node:
            folder = tmp_path / str(len(made))
            folder.mkdir()
            port, replay_port = free_ports(2)
            config = {
                "enable_kv_cache_events": True,
                "endpoint": f"tcp://127.0.0.1:{port}",
                "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
                "buffer_steps": buffer_steps,
            }
            flags = ("--kv-events-config", json.dumps(config), *flags)
            process = stack.enter_context(StoreProcess(folder, "64MiB", *flags))
            made.append(Node(process, port, replay_port))
            return made[-1]

        yield begin


class Router:
    """The index of a router, with its clock."""

    def __init__(
        self,
        *nodes: Node,
        ports: dict[str, int] | None = None,
        asks: bool = True,
        blocks: int = 10_000,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        places = {node.url.partition("://")[2]: node for node in nodes}
        heard = {place: node.port for place, node in places.items()}
        replays = {place: node.replay_port for place, node in places.items() if asks}
        self.index = NodeIndex(blocks, heard if ports is None else ports, replays, clock)
        self.index.follow([node.url for node in nodes])
        self._ticking = asyncio.create_task(every(0.05, self.index.tick))

    def held(self, chain: bytes = CHAIN, manifest: Manifest = MANIFEST) -> dict[str, int]:
        return self.index.match([CacheGroup(manifest.digest.hex())], chain)

    def reason(self, node: Node) -> Reason:
        return dict(self.index.states())[node.url]

    async def is_known(self, node: Node, reason: Reason) -> None:
        await until(lambda: self.reason(node) is reason, PATIENCE_S)

    async def holds(self, node: Node, blocks: int | None) -> None:
        """Wait until the node is known to hold so many blocks; None: until it is not known."""
        await until(lambda: self.held().get(node.url) == blocks, PATIENCE_S)

    def close(self) -> None:
        self._ticking.cancel()
        self.index.close()


@pytest.fixture
async def router() -> AsyncIterator[Callable[..., Router]]:
    made: list[Router] = []

    def begin(*nodes: Node, **options: Any) -> Router:
        made.append(Router(*nodes, **options))
        return made[-1]

    yield begin
    for each in made:
        each.close()


Watch = Callable[..., Router]


async def test_a_router_knows_what_a_node_holds_and_what_it_holds_no_longer(
    start: Start, router: Watch
) -> None:
    node = start()
    here = router(node)
    await here.holds(node, 0)
    await node.put(CHAIN)
    await here.holds(node, BLOCKS)
    await node.delete(CHAIN[-32 * 4 :])
    await here.holds(node, BLOCKS - 4)
    assert here.held(manifest=OTHER) == {node.url: 0}
    await node.put(CHAIN[: 32 * 3], OTHER)
    await until(lambda: here.held(manifest=OTHER) == {node.url: 3}, PATIENCE_S)


async def test_a_block_that_is_evicted_leaves_the_index(start: Start, router: Watch) -> None:
    node, big, more = start("--memory", "1MiB"), manifest_of(64 << 10), chain_of(12, "b")
    here = router(node)
    await node.put(CHAIN, big)
    await node.put(more, big)

    def asked(chain: bytes) -> int:
        with StoreClient(node.url) as client:
            return client.match(big, chain).blocks

    left = [await asyncio.to_thread(asked, chain) for chain in (CHAIN, more)]
    assert 0 < sum(left) < 24
    await until(
        lambda: [here.held(chain, big).get(node.url) for chain in (CHAIN, more)] == left, PATIENCE_S
    )


@pytest.mark.parametrize("buffer_steps", [1000, 2])
async def test_a_router_that_comes_late_learns_everything(
    start: Start, router: Watch, buffer_steps: int
) -> None:
    node = start(buffer_steps=buffer_steps)
    first = router(node)
    for blocks in range(1, BLOCKS + 1):  # a message for each
        await node.put(CHAIN[: 32 * blocks])
        await first.holds(node, blocks)
    late = router(node)
    await late.holds(node, BLOCKS)
    await first.holds(node, BLOCKS)


async def test_a_node_that_dies_is_not_known_and_one_that_restarts_is_known_anew(
    start: Start, router: Watch
) -> None:
    node = start()
    here = router(node)
    await node.put(CHAIN)
    await here.holds(node, BLOCKS)
    node.process.kill()
    await here.holds(node, None)
    assert here.reason(node) is Reason.CUT
    node.process.start()
    await here.holds(node, 0)
    await node.put(CHAIN[: 32 * 2])
    await here.holds(node, 2)


async def test_what_a_node_finds_on_its_disk_is_known_after_a_restart(
    start: Start, router: Watch, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    node = start("--disk", str(disk), "--disk-size", "16MiB")
    await node.put(CHAIN)
    assert node.process.stop() == 0
    node.process.start()
    here = router(node)
    await here.holds(node, 0)  # it does not know what makes a block before an engine says so
    await node.put(b"")
    await here.holds(node, BLOCKS)


async def test_messages_that_are_lost_are_asked_for_again(start: Start, router: Watch) -> None:
    node, heard, extra = start(), list[int](), itertools.count(1)

    def forgets(count: int, _: int) -> bool:
        heard.append(count)
        return count % 2 == 0

    async def put_more() -> None:  # what follows shows what was lost
        await node.put(chain_of(next(extra), "x"))

    async with Forgetful(node.port, forgets) as port:
        here = router(node, ports={"": port})
        await until(lambda: heard, PATIENCE_S, meanwhile=put_more)
        for blocks in range(1, BLOCKS + 1):
            before = len(heard)
            await node.put(CHAIN[: 32 * blocks])
            await until(lambda before=before: len(heard) > before, PATIENCE_S)
        await until(lambda: here.held().get(node.url) == BLOCKS, PATIENCE_S, meanwhile=put_more)
        assert here.index.counts["gaps"]


async def test_a_restart_is_noticed_also_by_a_message_with_the_expected_number(
    start: Start, router: Watch
) -> None:
    node, heard, expected = start(buffer_steps=1), list[int](), 0

    def forgets(_: int, number: int) -> bool:
        heard.append(number)
        return number % (1 << COUNT_BITS) < expected

    async with Forgetful(node.port, forgets) as port:
        here = router(node, ports={"": port}, asks=False)
        while not heard:
            await node.put(CHAIN)
            await node.delete(CHAIN)

        async def begin_anew() -> None:
            await node.delete(CHAIN)
            await node.put(CHAIN)
            asking = router(node)
            await asking.holds(node, BLOCKS)  # it asks for all messages, so the node begins anew
            asking.close()  # it would ask the node of the next life too

        def complete() -> bool:
            return here.reason(node) is Reason.COMPLETE and here.held() == {node.url: BLOCKS}

        await until(complete, PATIENCE_S, meanwhile=begin_anew, look_s=0.2)
        expected = heard[-1] % (1 << COUNT_BITS) + 1
        node.process.kill()
        node.process.start()
        async with asyncio.timeout(PATIENCE_S):
            extra = 0
            while here.held():
                extra += 1
                await node.put(chain_of(extra, "x"))
        assert here.reason(node) is Reason.LATE


async def test_a_node_that_hangs_is_asked_once_and_then_not_counted_on(
    start: Start, router: Watch
) -> None:
    nodes = [start(), start()]
    here = router(*nodes)
    view = NodesView(lambda url: AsyncStoreClient(url, deadline_s=0.5), here.index)
    view.follow([node.url for node in nodes])
    await view.start(PATIENCE_S)
    await nodes[0].put(CHAIN[: 32 * 5])
    await nodes[1].put(CHAIN)
    await here.holds(nodes[0], 5)
    await here.holds(nodes[1], BLOCKS)
    name = MANIFEST.digest.hex()
    assert (await view.match(name, CHAIN)).blocks == BLOCKS
    nodes[1].process.send(signal.SIGSTOP)
    try:
        begun_s = monotonic()
        assert [(await view.match(name, CHAIN)).blocks for _ in range(3)] == [5, 5, 5]
        assert monotonic() - begun_s < 5
    finally:
        nodes[1].process.send(signal.SIGCONT)
        here.close()
        await view.close()


async def test_a_node_that_left_is_forgotten(start: Start, router: Watch) -> None:
    nodes = [start(), start()]
    here = router(*nodes)
    for node in nodes:
        await node.put(CHAIN)
        await here.holds(node, BLOCKS)
    here.index.follow([nodes[0].url])
    assert here.held() == {nodes[0].url: BLOCKS}
    here.index.follow([node.url for node in nodes])
    await here.holds(nodes[1], BLOCKS)


async def test_nodes_of_an_index_that_was_full_are_learnt_again_one_by_one(
    start: Start, router: Watch
) -> None:
    nodes, clock = [start(), start(), start()], Clock()
    chains = [CHAIN[: 32 * 5], chain_of(5, "b"), chain_of(12, "c")]
    here = router(*nodes, blocks=16, clock=clock)
    for node, chain in zip(nodes, chains, strict=True):
        await here.holds(node, 0)
        await node.put(chain)
    for node in nodes:
        await here.is_known(node, Reason.FULL)
    here.index.follow([node.url for node in nodes[:2]])
    await here.holds(nodes[0], 5)
    assert here.reason(nodes[1]) is Reason.FULL  # each tells all that it holds: not all at once
    clock.now += RELEARN_S
    await here.is_known(nodes[1], Reason.COMPLETE)
    assert here.held(chains[1]) == {nodes[0].url: 0, nodes[1].url: 5}


def refusal(config: Json, *flags: str) -> str:
    """What a node says that refuses to start with `config` for its events."""
    command = [*NODE, "--kv-events-config", json.dumps(config), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    return done.stderr


def test_a_node_of_several_tenants_publishes_nothing(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a:" + "x" * 32 + "\nb:" + "y" * 32 + "\n")
    tokens.chmod(0o600)
    told = refusal({"enable_kv_cache_events": True}, "--token-file", str(tokens))
    assert "a node of several tenants publishes none" in told


@pytest.mark.parametrize(
    ("flags", "code"), [((), 2), (("--insecure", "true"), 0), (("--token-file", "tokens"), 0)]
)
def test_events_for_other_hosts_need_a_token_or_insecure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").write_text("a:" + "x" * 32 + "\n")
    (tmp_path / "tokens").chmod(0o600)
    (port,) = free_ports(1)
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}
    command = [*NODE, "--kv-events-config", json.dumps(config), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as node:
        assert node.stdout is not None
        assert node.stderr is not None
        if code == 0:
            assert node.stdout.readline().startswith(b"kvstore ready")
            node.terminate()
        told = node.stderr.read().decode()
        assert node.wait() == code
    assert (f"any host that reaches tcp://*:{port} could read the names" in told) is (code == 2)


@pytest.mark.parametrize("endpoint", ["7401", "tcp://127.0.0.1"])
def test_an_endpoint_that_cannot_be_used_is_refused_with_its_form(endpoint: str) -> None:
    told = refusal({"enable_kv_cache_events": True, "endpoint": endpoint})
    assert f"cannot listen at {endpoint}: Invalid argument; give tcp://HOST:PORT" in told


class Forgetful:
    """Passes messages of a publisher on, except those of which `forgets` is true; its port.

    forgets: takes the count of messages so far, and the number of this one.
    """

    def __init__(self, port: int, forgets: Callable[[int, int], bool]) -> None:
        self._context = zmq.asyncio.Context()
        self._source = self._context.socket(zmq.SUB)
        self._source.setsockopt(zmq.SUBSCRIBE, b"")
        self._source.connect(f"tcp://127.0.0.1:{port}")
        self._sink = self._context.socket(zmq.PUB)
        self._port = self._sink.bind_to_random_port("tcp://127.0.0.1")
        self._forgets = forgets

    async def __aenter__(self) -> int:
        self._task = asyncio.create_task(self._pass())
        return self._port

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _pass(self) -> None:
        for count in itertools.count(1):
            message = await self._source.recv_multipart()
            if not self._forgets(count, int.from_bytes(message[1], "big")):
                await self._sink.send_multipart(message)
