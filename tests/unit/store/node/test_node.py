"""The node as a process: its addresses, its HTTP side, its end."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.patience import eventually
from tests.fakes.store import RUN, StoreProcess, chain_of, manifest_of, put_chain

from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.results import SharingRefusal
from kvrouter_store.node.http_api import HttpApi
from kvrouter_store.node.own_client import OwnClient

pytestmark = pytest.mark.slow
MANIFEST = manifest_of(4096)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("node")) as node:
        yield node


def ask(node: StoreProcess, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(node.http_url + path, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def ask_json(node: StoreProcess, path: str, method: str = "GET") -> Any:
    status, body = ask(node, path, method)
    assert status == 200, body
    return json.loads(body)


def test_a_node_that_serves_is_healthy(node: StoreProcess) -> None:
    assert ask_json(node, "/healthz") == {"status": "ok"}


@pytest.mark.parametrize("framing", ["content-length: 4", "transfer-encoding: chunked"])
def test_a_request_with_two_lengths_is_refused(node: StoreProcess, framing: str) -> None:
    both = [framing, "content-length: 4", "transfer-encoding: chunked"]
    head = "\r\n".join(["GET /healthz HTTP/1.1", "host: x", *dict.fromkeys(both)])
    with socket.create_connection(("127.0.0.1", node.http_port), timeout=20) as client:
        client.sendall(f"{head}\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        answer = b""
        while piece := client.recv(4096):  # until it closes
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"HTTP/1.1 200" not in answer


def _answers(node: StoreProcess) -> bool:
    try:
        return ask(node, "/healthz")[0] == 200
    except OSError:  # of too many connections that are refused, the oldest end at once
        return False


def test_strangers_at_the_http_port_leave_descriptors_for_clients(tmp_path: Path) -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    node = StoreProcess(tmp_path)
    node.program = ["-c", f"{few}\n{RUN}"]
    with node, ExitStack() as strangers:
        for _ in range(200):
            stranger = strangers.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", node.http_port))
        assert eventually(lambda: _answers(node))  # the silent give way
        with StoreClient(node.url, transport="tcp", deadline_s=5) as client:
            assert put_chain(client, MANIFEST, chain_of(2)) == 2
    assert "Too many open files" not in node.log


def test_the_self_test_moves_blocks_and_leaves_none(node: StoreProcess) -> None:
    before = ask_json(node, "/stats")
    assert ask_json(node, "/selftest")["status"] == "ok"
    assert ask_json(node, "/selftest/7")["number"] == 7
    after = ask_json(node, "/stats")
    assert after["puts_total"] > before["puts_total"]
    assert after["blocks"] == before["blocks"]


def test_stats_are_flat_and_metrics_say_the_same(node: StoreProcess) -> None:
    stats = ask_json(node, "/stats")
    assert stats["free_bytes"] + stats["used_bytes"] == stats["pool_bytes"] == 64 << 20
    assert {"reserved_blocks", "leases", "fenced_blocks"} <= set(stats)
    assert all(isinstance(value, int) for value in stats.values())
    _, text = ask(node, "/metrics")
    lines = text.splitlines()
    assert f"kvstore:pool_bytes {float(64 << 20)}" in [_plain(line) for line in lines]
    assert "# TYPE kvstore:evictions_total counter" in lines
    assert "# TYPE kvstore:free_bytes gauge" in lines


def test_purge_forgets_blocks_and_says_how_many(node: StoreProcess) -> None:
    with StoreClient(node.url) as client:
        put_chain(client, MANIFEST, chain_of(5))
    assert ask_json(node, "/kvmap_len") == {"len": 5}
    assert ask_json(node, "/purge", "POST") == {"status": "ok", "num": 5}
    assert ask_json(node, "/kvmap_len") == {"len": 0}


def test_engines_are_listed_with_what_they_share_or_why_they_do_not(node: StoreProcess) -> None:
    reason = "its sliding window drops blocks"
    with StoreClient(node.url) as one, StoreClient(node.url) as other:
        one.register(MANIFEST, engine="http://e:1")
        other.register(manifest_of(512), engine="http://e:2", refusal=reason)
        listed = ask_json(node, "/engines")
        (mine,) = [m for m in listed["manifests"] if m["manifest"] == MANIFEST.digest.hex()]
        assert mine["engines"] == ["http://e:1"]
        assert mine["spec"]["model"] == "tiny"
        assert listed["refusals"] == [{"engine": "http://e:2", "reason": reason}]
        assert one.refusals() == other.refusals() == [SharingRefusal("http://e:2", reason)]
        _, text = ask(node, "/metrics")
    sample = f'kvstore:sharing_refused{{engine="http://e:2",reason="{reason}"}} 1.0'
    assert sample in text.splitlines()


def test_errors_have_the_shape_of_openai(node: StoreProcess) -> None:
    for path, method, status in (("/nowhere", "GET", 404), ("/purge", "GET", 405)):
        code, body = ask(node, path, method)
        assert code == status
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == status


async def test_a_self_test_that_fails_is_an_error_with_its_reason(server: StoreServer) -> None:
    class Broken(OwnClient):
        def selftest(self) -> None:
            raise RuntimeError("block 1 came back wrong")

    answer = await HttpApi(server, Broken("kv://127.0.0.1:1")).answer("GET", "/selftest", {})
    assert answer.status == 500
    assert "block 1 came back wrong" in json.loads(answer.body)["error"]["message"]


def test_idle_connections_to_the_http_port_take_few_descriptors(node: StoreProcess) -> None:
    def files() -> int:
        return len(os.listdir(f"/proc/{node.pid}/fd"))

    before = files()
    with ExitStack() as idle:
        for _ in range(200):
            idle.enter_context(socket.create_connection(("127.0.0.1", node.http_port)))
        assert eventually(lambda: files() < before + 100)
        assert eventually(lambda: ask(node, "/healthz")[0] == 200)  # the silent ones give way
    assert eventually(lambda: files() <= before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_node_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    node = StoreProcess(tmp_path).start()
    with StoreClient(node.url) as client:
        put_chain(client, MANIFEST, chain_of(2))
        assert Path(node.unix_path).is_socket()
        assert node.end(number) == 0
    assert not Path(node.unix_path).exists()


def test_a_taken_port_is_one_sentence_with_the_remedy(node: StoreProcess, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("kvrouter")), "store", "--port", str(node.port)]
    command += ["--http-port", "0", "--unix-socket", str(tmp_path / "t.sock")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "choose a free --port" in done.stderr


def test_a_pool_that_the_machine_cannot_hold_is_refused(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("kvrouter")), "store", "--memory", "4PiB"]
    command += ["--port", "0", "--http-port", "0", "--unix-socket", str(tmp_path / "t.sock")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "a --memory that this machine has" in done.stderr


def _plain(line: str) -> str:
    """A sample with its value in one spelling, whatever the exposition chose."""
    name, _, value = line.rpartition(" ")
    return line if line.startswith("#") else f"{name} {float(value)}"
