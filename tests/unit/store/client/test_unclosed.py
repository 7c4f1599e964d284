"""Programs that end without close(), whatever their daemon threads do: no report, no abort."""

import subprocess
import sys

import pytest
from tests.fakes.store import ROOT

pytestmark = pytest.mark.slow
BEGIN = """
import logging, threading
from tests.fakes.store import Memory, chain_of, manifest_of, put_chain
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.link import StoreLink
manifest, chain = manifest_of(1 << 20), chain_of(4)
client = StoreClient({url!r}, transport={transport!r})
put_chain(client, manifest, chain)
begun, ever = threading.Barrier(3), threading.Event()
def load():
    memory = Memory(4, 1 << 20)
    begun.wait()
    while True:
        client.get_into(manifest, 0, chain, range(4), memory.segments, range(4))
def hold(held):
    begun.wait()
    ever.wait()
def start(target, *arguments):
    for _ in range(2):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    begun.wait()
"""
ENDS = {
    "with a client": "",
    "with threads that load": "start(load)",
    "with threads that hold a client": "start(hold, client)",
    "with a lease": "lease = client.acquire(manifest, chain, 0)",
    "with a link": "StoreLink(client, manifest, logging.getLogger(), engine='e').start()",
}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_closes_nothing_ends_in_silence(url: str, transport: str, end: str) -> None:
    code = BEGIN.format(url=url, transport=transport) + ENDS[end]
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
