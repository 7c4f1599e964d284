"""The client processes of the store benchmark, and one timed run of several of them at once."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers_setup import Found
from benchmarks.store.nodes import ROOT, Node, variables
from benchmarks.wire_rig import on_core

ANSWER_DEADLINE_S = 60
STOP_DEADLINE_S = 10
HEAD_START_S = 0.002


class ClientFailed(RuntimeError):
    """A client process reported a failure, or did not answer."""


@dataclass(frozen=True)
class Timed:
    """One run of all clients: CPU of clients and server; latencies of calls, or units done."""

    seconds: float
    cpu_s: float
    calls_ns: tuple[int, ...] = ()
    units: int = 0


class Client:
    """A process of benchmarks.store.worker in one of the environments."""

    def __init__(self, python: Path, variables: dict[str, str], log: Path) -> None:
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                [str(python), "-m", "benchmarks.store.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=os.environ | variables,
                cwd=ROOT,
            )
        self._unread = b""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps({"do": do} | arguments).encode() + b"\n")
            self._popen.stdin.flush()
        except OSError as error:
            raise ClientFailed(f"a client process ended: {error}") from error

    def answer(self) -> dict[str, Any]:
        """Its answer to the last command. Raises ClientFailed."""
        assert self._popen.stdout is not None
        fd = self._popen.stdout.fileno()
        deadline = time.monotonic() + ANSWER_DEADLINE_S
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
                raise ClientFailed(f"a client process hung for {ANSWER_DEADLINE_S} s")
            data = os.read(fd, 1 << 20)
            if not data:
                raise ClientFailed(f"a client process ended ({self._popen.wait()})")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ClientFailed(answer["error"])
        return answer

    def leave(self) -> None:
        """Ask it to end."""
        assert self._popen.stdin is not None
        with suppress(OSError):
            self._popen.stdin.close()

    def end(self) -> None:
        """Wait for its end; then kill it."""
        assert self._popen.stdout is not None
        try:
            self._popen.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()


class Crew:
    """Client processes by environment, on `cores`, started at first use and reused."""

    def __init__(self, folder: Path, found: dict[str, Found], cores: Sequence[int]) -> None:
        self._folder = folder
        self._cores = cores
        self._found = found
        self._clients: dict[str, list[Client]] = {}

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss(*self._clients)

    def clients(self, environment: str, count: int) -> list[Client]:
        """The first `count` clients of an environment."""
        clients = self._clients.setdefault(environment, [])
        found = self._found.get(environment)
        python = found.program if found else Path(sys.executable)
        while len(clients) < count:
            log = self._folder / f"client-{environment or 'own'}-{len(clients)}.log"
            with on_core(*self._cores):
                clients.append(Client(python, variables(found), log))
        return clients[:count]

    def dismiss(self, *environments: str) -> None:
        """End the clients of some environments at once."""
        leaving = [client for name in environments for client in self._clients.pop(name, [])]
        for client in leaving:
            client.leave()
        for client in leaving:
            client.end()


def in_step(clients: Sequence[Client], do: str, **arguments: Any) -> list[dict[str, Any]]:
    """Send one command to all clients; their answers."""
    for client in clients:
        client.send(do, **arguments)
    return answers_of(clients)


def answers_of(clients: Sequence[Client]) -> list[dict[str, Any]]:
    """The answer of each to its last command. Raises the first failure after all have answered."""
    answers, failures = [], []
    for client in clients:
        try:
            answers.append(client.answer())
        except ClientFailed as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return answers


def timed(clients: Sequence[Client], node: Node, do: str, **arguments: Any) -> Timed:
    """Run a command that all clients begin together; wall time from the first to the last."""
    cpu_s = node.cpu_s()
    start_s = time.perf_counter() + HEAD_START_S
    answers = in_step(clients, do, start_s=start_s, **arguments)
    cpu_s = node.cpu_s() - cpu_s + sum(a["cpu_ns"] for a in answers) / 1e9
    begun, ended = min(a["begun"] for a in answers), max(a["ended"] for a in answers)
    return Timed(
        seconds=(ended - begun) / 1e9,
        cpu_s=cpu_s,
        calls_ns=tuple(call for a in answers for call in a.get("calls", ())),
        units=sum(a.get("units", 0) for a in answers),
    )
