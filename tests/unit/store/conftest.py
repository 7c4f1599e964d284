from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.certificates import Authority
from tests.fakes.disk import DISK, DiskNode

from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.dialer import TransportName

MIB = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    """A node with a pool of 16 MiB, in this process."""
    node = StoreServer(unix_path=str(tmp_path / "s.sock"), pool_bytes=16 * MIB)
    node.start()
    yield node
    node.stop()


@pytest.fixture
def url(server: StoreServer) -> str:
    return f"kv://127.0.0.1:{server.port}"


@pytest.fixture
def connect(url: str) -> Iterator[Callable[..., StoreClient]]:
    """Makes clients of the node, closed when the test ends."""
    made: list[StoreClient] = []

    def connect(transport: TransportName = "auto", **options: object) -> StoreClient:
        client = StoreClient(url, transport=transport, **options)  # type: ignore[arg-type]
        made.append(client)
        return client

    yield connect
    for client in made:
        client.close()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A CA of this run of the tests."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def client(connect: Callable[..., StoreClient]) -> StoreClient:
    return connect()


@pytest.fixture
def start_over_disk(tmp_path: Path) -> Iterator[Callable[..., DiskNode]]:
    """Starts nodes, one after the other, over the same disk."""
    nodes: list[DiskNode] = []

    def start(*flags: str, size: str = DISK) -> DiskNode:
        nodes.append(DiskNode(tmp_path, *flags, size=size))
        return nodes[-1].start()

    yield start
    for node in nodes:
        node.kill()
