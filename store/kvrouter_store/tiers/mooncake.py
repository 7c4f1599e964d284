"""Mooncake Store as a tier, by its own client. The process is a pure client, without a segment.

    mooncake://MASTER:50051[?metadata=P2PHANDSHAKE&protocol=tcp&devices=&replicas=1&local=HOST]

`metadata` is P2PHANDSHAKE, http://HOST:PORT/metadata or etcd://HOST:PORT, as the storage nodes have
it. `local`: the address of this host for them; by default that from which it reaches the master.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Any, Final

from kvrouter_store.tiers.base import (
    Item,
    Memory,
    TierAway,
    TierRefused,
    TierStatus,
    address_of,
    check_package,
    options_of,
    shown,
)

PORT: Final = 50051
DEFAULTS: Final = {
    "metadata": "P2PHANDSHAKE",
    "protocol": "tcp",
    "devices": "",
    "replicas": "1",
    "local": "",
}
GONE: Final = frozenset({-703, -704, -710, -712})  # no object, or no replica (any more)
EXISTS: Final = -705
OTHER_SIZE: Final = -600
AWAY: Final = frozenset({-900, -901})  # the master did not answer
PROBE: Final = "kvrouter"


class MooncakeTier:
    """Values are objects. Each call blocks in a thread; to be used in a process of its own."""

    def __init__(self, url: str) -> None:
        self.name = shown(url)
        self._options = DEFAULTS | options_of(url, list(DEFAULTS))
        self._master = address_of(url, PORT)
        if not self._options["replicas"].isdecimal():
            raise TierRefused(f"--tier {self.name} needs a number of replicas, as replicas=2")
        check_package(url, "mooncake", "mooncake-transfer-engine")
        self._store: Any = None
        self._config: Any = None
        self._address = 0

    async def start(self, memory: Memory) -> None:
        """Set a client up, and have the master answer once."""
        self._address = memory.address
        await asyncio.to_thread(self._set_up, len(memory.view))
        await self.holds([PROBE])

    async def holds(self, keys: Sequence[str]) -> list[bool]:
        """By batch_is_exist."""
        return [found == 1 for found in await self._call("batch_is_exist", list(keys))]

    async def load(self, items: Sequence[Item]) -> list[TierStatus]:
        """By batch_get_into."""
        codes = await self._call("batch_get_into", *self._lists(items))
        return [_status(item.size, code) for item, code in zip(items, codes, strict=True)]

    async def store(self, items: Sequence[Item]) -> list[TierStatus]:
        """By batch_put_from: what is there stays."""
        codes = await self._call("batch_put_from", *self._lists(items), self._config)
        return [TierStatus.OK if code in {0, EXISTS} else TierStatus.FAILED for code in codes]

    async def drop(self, keys: Sequence[str]) -> None:
        """By batch_remove, also where a reader has a lease."""
        await self._call("batch_remove", list(keys), True)

    async def stop(self) -> None:
        """Nothing: the process ends."""

    def _set_up(self, memory_bytes: int) -> None:
        local = self._options["local"] or _address_towards(self._master)
        # Otherwise Mooncake announces the first address of this host, which others may not reach.
        os.putenv("MC_TCP_BIND_ADDRESS", local)
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: PLC0415

        store = MooncakeDistributedStore()
        code = store.setup(
            {
                "local_hostname": local,  # without a port: each process takes another one
                "metadata_server": self._options["metadata"],
                "global_segment_size": "0",
                "local_buffer_size": "0",
                "protocol": self._options["protocol"],
                "rdma_devices": self._options["devices"],
                "master_server_addr": self._master,
            }
        )
        if code:
            raise TierAway(f"the client cannot be set up, with code {code}")
        code = store.register_buffer(self._address, memory_bytes)
        if code:
            raise TierAway(f"its memory cannot be registered, with code {code}")
        self._config = ReplicateConfig()
        self._config.replica_num = int(self._options["replicas"])
        self._store = store

    def _lists(self, items: Sequence[Item]) -> tuple[list[str], list[int], list[int]]:
        addresses = [self._address + item.at for item in items]
        return [item.key for item in items], addresses, [item.size for item in items]

    async def _call(self, operation: str, *arguments: object) -> list[int]:
        """The code for each key. TierAway where the master answers for none."""
        codes: list[int] = await asyncio.to_thread(getattr(self._store, operation), *arguments)
        if codes and all(code in AWAY for code in codes):
            raise TierAway(f"the master does not answer, with code {codes[0]}")
        return codes


def _status(size: int, code: int) -> TierStatus:
    """What the code of a get means: it is the number of bytes where there is a value."""
    if code == size:
        return TierStatus.OK
    if code in GONE:
        return TierStatus.MISSING
    return TierStatus.FALSIFIED if code >= 0 or code == OTHER_SIZE else TierStatus.FAILED


def _address_towards(master: str) -> str:
    """The address from which this host sends to the master. Sends nothing."""
    host, _, port = master.rpartition(":")
    try:
        kind, _, _, _, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TierAway(f"the master's address is not known: {error}") from None
