"""Store nodes that offer RDMA: in a process of their own, or on the machine beside this one.

python -m tests.fakes.rdma_store WHERE FLAG VALUE..., WHERE as tests.fakes.doomed_client has it.
"""

import os
import sys
from pathlib import Path

from tests.fakes.patience import eventually
from tests.fakes.rdma import opens_of
from tests.fakes.store import PATIENCE_S, StoreProcess

from kvrouter.app.store_node import run
from kvrouter_store import _core
from kvrouter_store._core import AcquireReply, Segments, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import StoreUnavailable
from kvrouter_store.identity.block import Manifest
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.rdma.initiator import Initiator, Opens, RemotePool

__all__ = ["NodeBeside", "RdmaStore", "overwrite_over_rdma", "url_of"]

# Where a node runs on the other of two machines, as kv://HOST:PORT; `make rdma` sets it.
BESIDE = os.environ.get("KVROUTER_RDMA_STORE", "")
BOOT_S = 60.0


class RdmaStore(StoreProcess):
    """As StoreProcess; it has no Unix socket, so that nobody maps its pool."""

    def __init__(self, folder: Path, where: str, *flags: str) -> None:
        super().__init__(folder, "64MiB", "--rdma", "on", *flags)
        self.unix_path = "none"
        self.program = ["-m", "tests.fakes.rdma_store", where]


class NodeBeside:
    """The node on the other machine, empty and with nobody connected at first."""

    def __init__(self) -> None:
        self.url = BESIDE
        self.unix_path = ""
        self.port = int(self.url.rpartition(":")[2])
        self._asking = StoreClient(self.url, transport="tcp", deadline_s=PATIENCE_S)
        assert eventually(self._is_empty, BOOT_S)

    def stats(self) -> dict[str, int]:
        """What it tells of itself."""
        return self._asking.stats()

    def close(self) -> None:
        self._asking.close()

    def _is_empty(self) -> bool:
        try:
            self._asking.purge()
            stats = self._asking.stats()
        except StoreUnavailable:
            return False
        return stats["connections"] == 1 and stats["queue_pairs"] == stats["used_bytes"] == 0


def url_of(node: StoreServer | NodeBeside) -> str:
    """Where clients find it."""
    return node.url if isinstance(node, NodeBeside) else f"kv://127.0.0.1:{node.port}"


def overwrite_over_rdma(
    url: str, opens: Opens, manifest: Manifest, hashes: bytes, data: bytes
) -> None:
    """As tests.fakes.store.overwrite_stored, by who is attached and means no good."""
    rdma, deadline = Initiator(opens=opens), Deadline(PATIENCE_S)
    with StoreClient(url, transport="rdma", rdma=rdma, deadline_s=PATIENCE_S) as client:
        manifest_id = client.register(manifest).manifest_id
        (channel,) = client.channels()
        remote, names = channel.remote, (manifest_id, 0, hashes)
        assert isinstance(remote, RemotePool)
        held = channel.ask(AcquireReply, deadline, _core.encode_acquire, *names)
        source = Segments.over(bytearray(data), len(data))
        with remote.memory.held(source, [0]) as keys:
            remote.write(remote.copies(keys, source, [0], [held.offsets[0]]), deadline)


if __name__ == "__main__":
    names = [flag[2:].replace("-", "_") for flag in sys.argv[2::2]]
    settings = dict(zip(names, sys.argv[3::2], strict=True))
    sys.exit(run(StoreSettings(**settings), opens_of(sys.argv[1])))  # type: ignore[arg-type]
