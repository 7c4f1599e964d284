"""InfiniStore as a tier, over RDMA, by its own client.

    infinistore://HOST:12345[?device=mlx5_1&port=1&link=Ethernet]

Not over TCP: a get of a missing key never ends there, and a key is visible before its bytes are.
"""

import asyncio
import re
import socket
from collections import defaultdict
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

PORT: Final = 12345
DEFAULTS: Final = {"device": "mlx5_1", "port": "1", "link": "Ethernet", "type": "RDMA"}
LINKS: Final = ("Ethernet", "IB")
PROBE: Final = "kvrouter"
REFUSED: Final = re.compile(r"ret = \d+$")
"""The end of an error that the server answers; the connection is of use still."""
MARK: Final = 0xA5


class InfiniStoreTier:
    """Values are keys of one size per call; to be used in a process of its own.

    The server reads and writes the memory by itself. What it has not acknowledged ends with the
    connection, which is to say with the process.
    """

    def __init__(self, url: str) -> None:
        self.name = shown(url)
        self._options = DEFAULTS | options_of(url, list(DEFAULTS))
        if self._options["type"].upper() != "RDMA":
            raise TierRefused(
                f"--tier {self.name} is for RDMA alone: over TCP, InfiniStore never answers a get "
                "of a key that it does not have; leave out type="
            )
        if self._options["link"] not in LINKS or not self._options["port"].isdecimal():
            raise TierRefused(f"--tier {self.name} needs link={' or link='.join(LINKS)}, port=1")
        self._place = address_of(url, PORT)
        if self._place.startswith("["):
            raise TierRefused(f"--tier {self.name} needs an IPv4 address, or a name that has one")
        check_package(url, "infinistore", "infinistore")
        self._connection: Any = None
        self._memory: Memory
        self._control = asyncio.Lock()

    async def start(self, memory: Memory) -> None:
        """Connect, register the memory, and have the server answer once."""
        self._memory = memory
        await asyncio.to_thread(self._connect)
        await self.holds([PROBE])

    async def holds(self, keys: Sequence[str]) -> list[bool]:
        """By check_exist, one after the other: all share one socket."""

        def check() -> list[bool]:
            return [bool(self._connection.check_exist(key)) for key in keys]

        async with self._control:
            return await asyncio.to_thread(check)

    async def load(self, items: Sequence[Item]) -> list[TierStatus]:
        """By RDMA. One missing key fails its whole call: then each is asked for by itself."""
        found: dict[Item, TierStatus] = {}
        for same in _by_size(items):
            found |= await self._read(same)
        return [found[item] for item in items]

    async def store(self, items: Sequence[Item]) -> list[TierStatus]:
        """By RDMA. A value that is there is replaced."""
        done: dict[Item, TierStatus] = {}
        for same in _by_size(items):
            status = await self._transfer(self._connection.rdma_write_cache_async, same)
            done |= dict.fromkeys(same, status)
        return [done[item] for item in items]

    async def drop(self, keys: Sequence[str]) -> None:
        """By delete_keys."""
        async with self._control:
            await asyncio.to_thread(self._connection.delete_keys, list(keys))

    async def stop(self) -> None:
        """Nothing: the process ends."""

    def _connect(self) -> None:
        import infinistore  # noqa: PLC0415

        host, _, port = self._place.rpartition(":")
        try:
            config = infinistore.ClientConfig(
                host_addr=socket.gethostbyname(host),  # it resolves no names
                service_port=int(port),
                connection_type=infinistore.TYPE_RDMA,
                dev_name=self._options["device"],
                ib_port=int(self._options["port"]),
                link_type=self._options["link"],
                log_level="warning",
            )
            connection = infinistore.InfinityConnection(config)
            connection.connect()
            connection.register_mr(self._memory.address, len(self._memory.view))
        except Exception as error:
            raise TierAway(str(error)) from None
        self._connection = connection

    async def _read(self, items: Sequence[Item], mark: int = MARK) -> dict[Item, TierStatus]:
        """Get values of one size.

        The server says nothing when it has a shorter one. Then a mark in the last byte stays, and
        stays again when it is another one.
        """
        view, lasts = self._memory.view, {item: item.at + item.size - 1 for item in items}
        for last in lasts.values():
            view[last] = mark
        status = await self._transfer(self._connection.rdma_read_cache_async, items)
        if status is TierStatus.OK:
            found = dict.fromkeys(items, status)
            marked = [item for item, last in lasts.items() if view[last] == mark]
            if marked and mark == MARK:
                return found | await self._read(marked, MARK ^ 0xFF)
            return found | dict.fromkeys(marked, TierStatus.FALSIFIED)
        if len(items) == 1:
            return {items[0]: status}
        alone = [await self._read([item]) for item in items]
        return {item: status for one in alone for item, status in one.items()}

    async def _transfer(self, call: Any, items: Sequence[Item]) -> TierStatus:
        from infinistore import InfiniStoreKeyNotFound  # noqa: PLC0415

        try:
            await call([(item.key, item.at) for item in items], items[0].size, self._memory.address)
        except InfiniStoreKeyNotFound:
            return TierStatus.MISSING
        except Exception as error:
            if REFUSED.search(str(error)):
                return TierStatus.FAILED
            raise
        return TierStatus.OK


def _by_size(items: Sequence[Item]) -> list[list[Item]]:
    sizes = defaultdict(list)
    for item in items:
        sizes[item.size].append(item)
    return list(sizes.values())
