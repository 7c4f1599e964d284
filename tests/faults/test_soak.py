"""Clients of every transport, killed at random moments while the pool overflows."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.gauges import assert_gauges_return, held
from tests.fakes.patience import eventually

from kvrouter_store._core import StoreServer

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = ("shm", "shm", "unix", "tcp")
KILLS = 16


def start(url: str, kind: str, seed: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.fakes.busy_client", url, kind, str(seed)]
    return subprocess.Popen(command, cwd=ROOT)


@pytest.mark.timeout(300)
def test_clients_killed_at_random_leave_nothing_and_read_nothing_wrong(
    server: StoreServer, url: str
) -> None:
    before = held(server)
    dice = random.Random(7)
    clients = [start(url, kind, seed) for seed, kind in enumerate(KINDS)]
    try:
        for number in range(KILLS):
            done = server.stats()["puts_total"] + dice.randint(5, 40)
            assert eventually(lambda done=done: server.stats()["puts_total"] >= done)
            place = dice.randrange(len(clients))
            assert clients[place].poll() is None, "a client ended by itself"
            clients[place].kill()
            clients[place].wait()
            clients[place] = start(url, KINDS[place], len(KINDS) + number)
        assert all(client.poll() is None for client in clients)
    finally:
        for client in clients:
            client.kill()
            client.wait()
    assert_gauges_return(server, before)
    stats = server.stats()
    assert stats["evictions_total.capacity"] > 0
    assert stats["corrupt_total"] == 0
