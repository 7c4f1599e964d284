from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrouter_store._core import StoreServer


@pytest.fixture
def lend_bytes() -> int | None:
    """What the node lends to clients on this host, to put without a request. None: its default."""
    return None


@pytest.fixture
def server(tmp_path: Path, lend_bytes: int | None) -> Iterator[StoreServer]:
    """A node with a pool of 4 MiB, in this process."""
    node = StoreServer(
        unix_path=str(tmp_path / "s.sock"), pool_bytes=4 << 20, lend_bytes=lend_bytes
    )
    node.start()
    yield node
    node.stop()


@pytest.fixture
def url(server: StoreServer) -> str:
    return f"kv://127.0.0.1:{server.port}"
