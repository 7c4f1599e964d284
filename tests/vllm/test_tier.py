"""The tier below vLLM's own offloading, by vLLM's real classes; its own file tier tells the same.

There is no device here: the stories (inside/tiering.py) write and read vLLM's host memory in the
place of its workers.
"""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import pytest
from tests.fakes.link import Link
from tests.fakes.patience import eventually
from tests.fakes.store import StoreProcess

from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient

TIERING = Path(__file__).parent / "inside" / "tiering.py"
TIMEOUT_S = 240
CHUNK_BYTES = 64 << 10
CONTRACT = {
    "offload": [True] * 4,
    "read": [True] * 4,
    "groups": True,
    "unknown": ["RETRY", *["MISS"] * 4],
    "gap": [True, True, None, True, None, True, None],
    "lost": [True, True],
    "fresh": [True, True],
    "drain": [True, True],
}
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * TIMEOUT_S)]


@pytest.fixture
def node() -> Iterator[StoreServer]:
    node = StoreServer(pool_bytes=16 << 20)
    node.start()
    yield node
    node.stop()


@pytest.fixture(scope="module")
def vllm_offloading(
    vllm_python: Path, site: Path | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The socket of a process that has imported vLLM, and forks for every connection."""
    path = str(tmp_path_factory.mktemp("tier") / "socket")
    paths = {"PYTHONPATH": str(site)} if site else {}
    process = subprocess.Popen(
        [vllm_python, TIERING, path],
        env={**os.environ, **paths, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert "listening\n" in process.stdout
        yield path
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # and whatever still tells a story
        process.communicate()


@pytest.fixture
def start(vllm_offloading: str) -> Iterator[Callable[..., "Stories"]]:
    """Starts vLLM's offloading over a tier, to tell stories."""
    with ExitStack() as connections:

        def begin(tier: dict[str, Any], *stories: str) -> Stories:
            connection = connections.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(TIMEOUT_S)
            connection.connect(vllm_offloading)
            connection.sendall(json.dumps([json.dumps(tier), *stories]).encode() + b"\n")
            return Stories(connection, connections.enter_context(connection.makefile()))

        yield begin


class Stories:
    """A process that tells stories, and stops where it is told to."""

    def __init__(self, connection: socket.socket, told: TextIO) -> None:
        self._connection = connection
        self._told = told

    def until_paused(self) -> None:
        """Return when it has come to its next pause."""
        said: list[str] = []
        for line in self._told:
            if line == "paused\n":
                return
            said.append(line)
        raise AssertionError("".join(said)[-3000:])

    def until_exited(self) -> tuple[int, str]:
        """Let it go on; its exit status and all it said, once it has ended."""
        self._connection.shutdown(socket.SHUT_WR)
        said, _, status = self._told.read().rpartition("\nexited ")
        return int(status), said

    def found(self) -> dict[str, Any]:
        """What it found, story by story, at its end."""
        status, said = self.until_exited()
        assert status == 0, said[-3000:]
        findings = [line for line in said.splitlines() if line.startswith("{")]
        told: dict[str, Any] = json.loads(findings[-1])
        return {name.split()[1]: finding for name, finding in told.items()}


def ours(url: str, **more: Any) -> dict[str, Any]:
    """The entry of "secondary_tiers" that brings our tier."""
    return {
        "type": "KVStoreTier",
        "module_path": "kvrouter_store.connectors.vllm_tier",
        "url": url,
        "weights_revision": "r1",
        **more,
    }


def url_of(node: StoreServer) -> str:
    return f"kv://127.0.0.1:{node.port}"


@pytest.mark.parametrize("kind", ["fs", "ours"])
def test_a_tier_keeps_the_contract_that_vllms_own_file_tier_keeps(
    start: Callable[..., Stories], node: StoreServer, tmp_path: Path, kind: str
) -> None:
    tier = ours(url_of(node)) if kind == "ours" else {"type": "fs", "root_dir": str(tmp_path)}
    assert start(tier, *CONTRACT).found() == CONTRACT


def test_what_one_process_put_another_reads_and_nothing_is_left_held(
    start: Callable[..., Stories], node: StoreServer
) -> None:
    assert start(ours(url_of(node)), "offload").found() == {"offload": [True] * 4}
    first = node.stats()["commits_total"]
    found = start(ours(url_of(node)), "read", "offload").found()
    assert found == {"read": [True] * 4, "offload": [True] * 4}
    stats = node.stats()
    assert stats["commits_total"] == first  # offloaded again, and not sent again
    assert stats["leases"] == stats["reserved_blocks"] == 0


def test_other_weights_read_nothing(start: Callable[..., Stories], node: StoreServer) -> None:
    start(ours(url_of(node)), "offload").found()
    found = start(ours(url_of(node), weights_revision="r2"), "read").found()
    assert found == {"read": [False] * 4}


@pytest.mark.parametrize(
    ("first", "second", "shared"), [("", "", False), ("a", "b", False), ("a", "a", True)]
)
def test_after_new_weights_only_engines_of_one_update_group_share(
    start: Callable[..., Stories], node: StoreServer, first: str, second: str, shared: bool
) -> None:
    one, other = (ours(url_of(node), update_group=group) for group in (first, second))
    assert start(one, "renew", "offload").found()["offload"] == [True] * 4
    assert start(other, "renew", "read").found()["read"] == [shared] * 4
    assert start(other, "read").found()["read"] == [False] * 4


def test_lost_chunks_are_computed_again(start: Callable[..., Stories], node: StoreServer) -> None:
    stories = start(ours(url_of(node)), "offload", "pause", "read", "fresh")
    stories.until_paused()
    with StoreClient(url_of(node)) as client:
        assert client.purge() > 0
    # Two chains of four chunks lie in vLLM's own memory; the others are gone.
    assert stories.found() == {
        "offload": [True] * 4,
        "read": [False, False, True, True],
        "fresh": [True, True],
    }


def test_an_engine_goes_on_without_a_store_that_died(start: Callable[..., Stories]) -> None:
    node = StoreServer(pool_bytes=16 << 20)
    node.start()
    stories = start(ours(url_of(node), deadline_s=0.5), "offload", "pause", "read", "fresh")
    stories.until_paused()
    node.stop()
    assert stories.found() == {
        "offload": [True] * 4,
        "read": [False, False, True, True],
        "fresh": [True, True],
    }


def test_an_engine_goes_on_beside_a_store_that_hangs(
    start: Callable[..., Stories], node: StoreServer
) -> None:
    with Link(("127.0.0.1", node.port)) as link:
        tier = ours(link.url, transport="tcp", deadline_s=0.5)
        stories = start(tier, "offload", "pause", "read", "lost", "fresh")
        stories.until_paused()
        link.stall()
        assert stories.found() == {
            "offload": [True] * 4,
            "read": [False, False, True, True],
            "lost": [True, True],
            "fresh": [True, True],
        }


def test_an_engine_starts_without_a_store(start: Callable[..., Stories]) -> None:
    found = start(ours("kv://127.0.0.1:9", deadline_s=0.5), "lost", "fresh").found()
    assert found == {"lost": [True, True], "fresh": [True, True]}


@pytest.fixture
def far(tmp_path: Path, start: Callable[..., Stories]) -> Iterator[StoreProcess]:
    """A node of another host, which has what the stories offload."""
    with StoreProcess(tmp_path) as node:
        start(ours(node.url), "offload").found()
        yield node


def beside(node: StoreServer, far: StoreProcess, **more: Any) -> dict[str, Any]:
    """The entry of a tier that may read from the far node, as from another host."""
    settings = {"neighbours": far.url, "transport": "tcp", "deadline_s": 1.0, **more}
    return ours(url_of(node), **settings)


def test_chunks_of_another_node_are_read_where_a_request_names_it(
    start: Callable[..., Stories], node: StoreServer, far: StoreProcess
) -> None:
    found = start(beside(node, far), "read", f"read {far.url}", "groups", "lost").found()
    assert found == {"read": [True] * 4, "groups": True, "lost": [True, True]}
    assert node.stats()["commits_total"] == 0


def test_the_hint_of_another_router_is_obeyed_and_answered(
    start: Callable[..., Stories], node: StoreServer, far: StoreProcess
) -> None:
    hint = far.url.replace("kv://", "tcp://")
    found = start(beside(node, far), f"read {hint}", "fetched").found()
    whole = {"requested": 4, "accepted": 4, "honoured": 4}
    assert found == {"read": [True] * 4, "fetched": [whole] * 4}


def test_a_hint_at_a_node_that_is_not_allowed_or_away_costs_a_computation(
    start: Callable[..., Stories], node: StoreServer, far: StoreProcess
) -> None:
    refused, lost = ({"requested": 4, "accepted": each, "honoured": 0} for each in (0, 4))
    hint = far.url.replace("kv://", "tcp://")
    other = beside(node, far, neighbours="127.0.0.1:9")
    found = start(other, f"read {hint}", "fetched", "read tcp://127.0.0.1:9", "fetched").found()
    assert found == {"read": [False] * 4, "fetched": [refused] * 4 + [lost] * 4}


def test_each_chunk_is_read_where_it_is(
    start: Callable[..., Stories], node: StoreServer, far: StoreProcess
) -> None:
    start(ours(url_of(node)), "half").found()
    found = start(beside(node, far), f"read {far.url}").found()
    assert found == {"read": [True] * 4}
    assert node.stats()["bytes_out_total"] == 2 * CHUNK_BYTES


def test_a_node_that_is_not_allowed_is_not_connected_to(
    start: Callable[..., Stories], node: StoreServer, far: StoreProcess
) -> None:
    with StoreClient(far.url) as client:
        before = client.stats()["connections_total"]
        tier = beside(node, far, neighbours="127.0.0.1:9")
        assert start(tier, f"read {far.url}").found() == {"read": [False] * 4}
        assert client.stats()["connections_total"] == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_computes_what_a_node_has_that_died_or_hangs(
    start: Callable[..., Stories], node: StoreServer, far: StoreProcess, number: signal.Signals
) -> None:
    stories = start(beside(node, far), "pause", f"read {far.url}", f"fresh {far.url}")
    stories.until_paused()
    if number == signal.SIGKILL:
        far.kill()
    else:
        far.send(number)
    try:
        assert stories.found() == {"read": [False] * 4, "fresh": [True, True]}
    finally:
        if number == signal.SIGSTOP:
            far.send(signal.SIGCONT)


def test_a_node_that_fails_while_it_is_read_costs_what_it_had(
    start: Callable[..., Stories], node: StoreServer, far: StoreProcess
) -> None:
    with Link(("127.0.0.1", far.port)) as link:
        tier = beside(node, far, neighbours=link.url)
        link.cut_after_down = 100 << 10  # in the midst of the first chain
        assert start(tier, f"read {link.url}").found()["read"][0] is False


def test_what_lands_at_another_node_is_awaited_there(
    start: Callable[..., Stories], node: StoreServer, tmp_path: Path
) -> None:
    with StoreProcess(tmp_path) as far, StoreClient(far.url) as client:
        stories = start(beside(node, far), f"await_landing {far.url}")
        assert eventually(lambda: client.stats()["waits"] == 1)
        start(ours(far.url), "offload").found()
        assert stories.found() == {"await_landing": [True] * 4}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"weights_revision": ""}, 'set "weights_revision"'),
        ({"urls": "kv://127.0.0.1:1"}, "'urls' is not a setting"),
        ({"url": ""}, '"url" is missing'),
    ],
)
def test_a_tier_that_cannot_work_says_what_to_set(
    start: Callable[..., Stories], change: dict[str, Any], sentence: str
) -> None:
    status, said = start({**ours("kv://127.0.0.1:9"), **change}, "lost").until_exited()
    assert status != 0
    assert sentence in said
