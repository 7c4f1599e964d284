"""What a tier below a node is: a store of other people, of values by keys. It knows no blocks."""

import asyncio
import ctypes
import mmap
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

T = TypeVar("T")


class TierRefused(Exception):
    """A tier cannot be used as it was asked for; one sentence with the remedy."""


class TierAway(Exception):
    """A tier cannot be reached, or has not answered; a part of a sentence."""


class TierStatus(Enum):
    """How it went with one value."""

    OK = "ok"
    MISSING = "missing"
    FAILED = "failed"
    FALSIFIED = "falsified"  # the key has something else, such as bytes of another size


class Item(NamedTuple):
    """One value: its key, and its place in the tier's memory."""

    key: str
    at: int
    size: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that values are copied from and to. Other processes can map it by its descriptor."""

    fd: int
    view: memoryview
    address: int

    @classmethod
    def of(cls, fd: int) -> "Memory":
        """The memory of this descriptor, mapped for as long as anything refers to it."""
        mapped = mmap.mmap(fd, 0)
        return cls(fd, memoryview(mapped), ctypes.addressof(ctypes.c_char.from_buffer(mapped)))


class Tier(Protocol):
    """A store below the node.

    `start` and `stop` take turns; the other calls come in between, several at a time. Each may be
    cancelled, and then ends only when nothing of it can touch the memory any more. Each may raise
    TierAway.
    """

    name: str
    """For people, in logs and metrics; without secrets."""

    async def start(self, memory: Memory) -> None:
        """Connect, and register the memory where the tier needs that. Returns when it answers."""

    async def holds(self, keys: Sequence[str]) -> list[bool]:
        """Of each key, whether the tier has a value."""

    async def load(self, items: Sequence[Item]) -> list[TierStatus]:
        """Get values of exactly these sizes. The memory of one that is not OK holds anything.

        FALSIFIED: that will not change by itself.
        """

    async def store(self, items: Sequence[Item]) -> list[TierStatus]:
        """Put values. Where a key has one already, either may stay."""

    async def drop(self, keys: Sequence[str]) -> None:
        """Forget values, where they are."""

    async def stop(self) -> None:
        """End all connections. Calls that still run fail. Idempotent, and raises nothing."""


async def complete(awaitable: Awaitable[T]) -> T:
    """The result of what may use memory until it ends: a cancellation waits for that end too."""
    work = asyncio.ensure_future(awaitable)
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        work.exception()  # nobody else looks at it
        raise asyncio.CancelledError
    return work.result()


def shown(url: str) -> str:
    """Scheme and place of a tier's URL: what may be logged."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('?')[0].partition('/')[0].rpartition('@')[2]}"


def options_of(url: str, known: Sequence[str]) -> dict[str, str]:
    """What a tier's URL has after its `?`. TierRefused for anything but `known`."""
    options = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    for name in options:
        if name not in known:
            raise TierRefused(
                f"--tier {shown(url)} has no option {name!r}; it has {', '.join(known)}"
            )
    return options


def address_of(url: str, port: int) -> str:
    """HOST:PORT of a tier's URL. TierRefused where it names none."""
    parts = urlsplit(url)
    try:
        host, given = parts.hostname, parts.port
    except ValueError:
        host = given = None
    if not host:
        raise TierRefused(f"--tier {shown(url)} names no host: write {parts.scheme}://HOST:{port}")
    return f"[{host}]:{given or port}" if ":" in host else f"{host}:{given or port}"


def check_package(url: str, module: str, package: str) -> None:
    """TierRefused where the package that speaks to a tier is not installed. Imports nothing."""
    if find_spec(module) is None:
        raise TierRefused(f"--tier {shown(url)} needs a package: pip install '{package}'")
