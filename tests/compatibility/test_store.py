"""Clients and store nodes of two versions: what one put the other finds, whatever the node."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.compatibility import client
from tests.compatibility.versions import Version

from kvrouter.tools.demo.children import Child, Children
from kvrouter_store import StoreClient, StoreRefused

pytestmark = [pytest.mark.compatibility, pytest.mark.timeout(400)]
Versions = dict[str, Version]
CLIENT = Path(client.__file__)
# node, writer, reader
MIXED = [
    ("earlier", "today's", "today's"),
    ("earlier", "today's", "earlier"),
    ("earlier", "earlier", "today's"),
    ("today's", "earlier", "earlier"),
    ("today's", "earlier", "today's"),
    ("today's", "today's", "earlier"),
]


async def start_node(children: Children, version: Version, folder: Path, *more: str) -> Child:
    flags = ("--port", "0", "--http-port", "0", "--memory", "64MiB", *more)
    socket = str(folder / "store.sock")
    return await children.start(
        "store", "store", *flags, "--unix-socket", socket, program=version.kvrouter
    )


async def use(version: Version, what: str, node: Child, transport: str) -> Any:
    """What a client of the version saw (tests/compatibility/client.py)."""
    code = f"import runpy; runpy.run_path({str(CLIENT)!r}, run_name='__main__')"
    process = await asyncio.create_subprocess_exec(
        *version.python(code),
        *(what, node.urls["kv"], transport),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    return json.loads(said)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("mixed", MIXED, ids="-".join)
async def test_clients_and_node_of_two_versions_share_blocks(
    versions: Versions, children: Children, tmp_path: Path, mixed: tuple[str, ...], transport: str
) -> None:
    node, writer, reader = (versions[name] for name in mixed)
    store = await start_node(children, node, tmp_path)
    put = await use(writer, "put", store, transport)
    assert put == {"landed": True, "stored": 3, "existed": 3, "transport": transport}
    got = await use(reader, "get", store, transport)
    assert got == {"matched": 3, "leased": 3, "right": True, "transport": transport}


async def test_todays_node_finds_what_an_earlier_one_left_on_its_disk(
    versions: Versions, children: Children, tmp_path: Path
) -> None:
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    disk = ("--disk", str(blocks), "--disk-size", "64MiB")
    before = await start_node(children, versions["earlier"], tmp_path, *disk)
    await use(versions["earlier"], "put", before, "tcp")
    before.process.terminate()  # it drains, and syncs its disk
    await before.process.wait()
    after = await start_node(children, versions["today's"], tmp_path, *disk)
    got = await use(versions["today's"], "get", after, "tcp")
    assert got == {"matched": 3, "leased": 3, "right": True, "transport": "tcp"}


async def test_an_earlier_node_refuses_a_request_that_it_does_not_know_and_serves_the_next(
    versions: Versions, children: Children, tmp_path: Path
) -> None:
    store = await start_node(children, versions["earlier"], tmp_path)

    def ask() -> str:
        with StoreClient(store.urls["kv"], transport="tcp") as asking:
            asking.register(client.manifest())
            with pytest.raises(StoreRefused, match="unknown op") as refused:
                asking.held(client.manifest(), client.chain(1))
            assert asking.match(client.manifest(), client.chain(1)).blocks == 0
            return refused.value.status

    assert await asyncio.to_thread(ask) == "BAD_REQUEST"
