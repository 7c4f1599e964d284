"""InfiniStore as a tier, over RDMA, by its own client.

    infinistore://HOST:12345[?device=mlx5_1&port=1&link=Ethernet]

Not over TCP: a get of a missing key never ends there, and a key is visible before its bytes are.
"""

import asyncio
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
        check_package(url, "infinistore", "infinistore")
        self._place = address_of(url, PORT)
        self._connection: Any = None
        self._address = 0
        self._control = asyncio.Lock()

    async def start(self, memory: Memory) -> None:
        """Connect, register the memory, and have the server answer once."""
        self._address = memory.address
        await asyncio.to_thread(self._connect, len(memory.view))
        await self.holds([PROBE])

    async def holds(self, keys: Sequence[str]) -> list[bool]:
        """By check_exist, one after the other: all share one socket."""

        def check() -> list[bool]:
            return [bool(self._connection.check_exist(key)) for key in keys]

        async with self._control:
            return await asyncio.to_thread(check)

    async def load(self, items: Sequence[Item]) -> list[TierStatus]:
        """By RDMA. One missing key fails its whole call: then each is asked for by itself."""
        from infinistore import InfiniStoreKeyNotFound  # noqa: PLC0415

        found: dict[Item, TierStatus] = {}
        for same in _by_size(items):
            try:
                await self._transfer(self._connection.rdma_read_cache_async, same)
                found |= dict.fromkeys(same, TierStatus.OK)
            except InfiniStoreKeyNotFound:
                if len(same) == 1:
                    found[same[0]] = TierStatus.MISSING
                else:
                    for one in same:
                        found[one] = (await self.load([one]))[0]
        return [found[item] for item in items]

    async def store(self, items: Sequence[Item]) -> list[TierStatus]:
        """By RDMA. A value that is there is replaced."""
        for same in _by_size(items):
            await self._transfer(self._connection.rdma_write_cache_async, same)
        return [TierStatus.OK] * len(items)

    async def drop(self, keys: Sequence[str]) -> None:
        """By delete_keys."""
        async with self._control:
            await asyncio.to_thread(self._connection.delete_keys, list(keys))

    async def stop(self) -> None:
        """Nothing: the process ends."""

    def _connect(self, memory_bytes: int) -> None:
        import infinistore  # noqa: PLC0415

        host, _, port = self._place.rpartition(":")
        config = infinistore.ClientConfig(
            host_addr=host,
            service_port=int(port),
            connection_type=infinistore.TYPE_RDMA,
            dev_name=self._options["device"],
            ib_port=int(self._options["port"]),
            link_type=self._options["link"],
            log_level="warning",
        )
        connection = infinistore.InfinityConnection(config)
        try:
            connection.connect()
            connection.register_mr(self._address, memory_bytes)
        except Exception as error:
            raise TierAway(str(error)) from None
        self._connection = connection

    async def _transfer(self, call: Any, items: Sequence[Item]) -> None:
        blocks = [(item.key, item.at) for item in items]
        await call(blocks, items[0].size, self._address)


def _by_size(items: Sequence[Item]) -> list[list[Item]]:
    sizes = defaultdict(list)
    for item in items:
        sizes[item.size].append(item)
    return list(sizes.values())
