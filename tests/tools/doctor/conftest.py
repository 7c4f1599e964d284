"""Set-ups for the doctor: a real store and real simulated engines, with one thing wrong."""

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.tools.sim.conftest import LiveSim

from kvrouter.tools.doctor.base import Host
from kvrouter.tools.doctor.run import DoctorSettings, Report, examine
from kvrouter.tools.sim.settings import SimSettings
from kvrouter_store._core import StoreServer

TOKEN = "0123456789abcdef0123456789abcdef"
BLOCK_TOKENS = 16
KV_BYTES_PER_TOKEN = 256


def enough(number: int) -> int:
    """Limits of a host that is set up well."""
    return resource.RLIM_INFINITY


@dataclass
class Rig:
    """A set-up that is started as its members say.

    Attributes:
        folder: for files.
        prefill, decode: settings of the two engines.
        store: arguments of the store node; `token`: what the engines show it.
        engines_first: whether the engines start before the store, which then needs a `port`.
        router: settings of the router, but for addresses.
        limit: of the host that the doctor sees.
        root: where its files are.
    """

    folder: Path
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    store: dict[str, Any] = field(default_factory=dict)
    token: str = ""
    engines_first: bool = False
    router: dict[str, Any] = field(default_factory=dict)
    limit: Callable[[int], int] = enough
    root: Path = field(init=False)
    node: StoreServer = field(init=False)
    engines: dict[str, LiveSim] = field(default_factory=dict)
    more: list[Callable[["Rig"], None]] = field(default_factory=list)
    more_sockets: list[socket.socket] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.root = self.folder / "root"

    @property
    def unix_path(self) -> Path:
        """The store's Unix socket."""
        return self.folder / "store.sock"

    def start(self) -> None:
        """Start the store and both engines, then do what is left to be done."""
        if not self.engines_first:
            self._start_node()
        for role, changes in (("prefill", self.prefill), ("decode", self.decode)):
            self.engines[role] = self.start_engine(**{"role": role, **changes})
        if self.engines_first:
            self._start_node()
        self.router = {
            "prefill": [self.address("prefill")],
            "decode": [self.address("decode")],
            "store": self.url,
            "store_token": self.token,
            "health_timeout_s": 10,
            "landing_timeout_s": 10,
            **self.router,
        }
        for each in self.more:
            each(self)

    def _start_node(self) -> None:
        node = {"pool_bytes": 16 << 20, "granule_bytes": 4096, "unix_path": str(self.unix_path)}
        self.node = self.start_store(**{**node, **self.store})

    def start_store(self, **arguments: Any) -> StoreServer:
        """One more store node."""
        node = StoreServer(host="127.0.0.1", **arguments)
        node.start()
        self._stack.callback(node.stop)
        return node

    def start_engine(self, **changes: Any) -> LiveSim:
        """One more engine."""
        whole = {
            "model": "tiny",
            "port": 0,
            "seed": 1,
            "block_size": BLOCK_TOKENS,
            "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
            "store": self.url,
            "store_token": self.token,
            **changes,
        }
        return self._stack.enter_context(LiveSim(SimSettings(**whole)))

    @property
    def url(self) -> str:
        """The store's."""
        return f"kv://127.0.0.1:{self.store.get('port') or self.node.port}"

    def address(self, role: str) -> str:
        """An engine's."""
        return f"127.0.0.1:{self.engines[role].port}"

    def settings(self) -> DoctorSettings:
        """The doctor's settings."""
        return DoctorSettings(**self.router)

    def examine(self) -> Report:
        """What the doctor says of it."""
        host = Host(self.root, limit=self.limit)
        return uvloop.run(examine(self.settings(), host))

    def close(self) -> None:
        """Stop everything."""
        self._stack.close()
        for each in self.more_sockets:
            each.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()
