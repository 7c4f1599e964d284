"""Stand-ins for the store that a connector has. They record; nothing is copied."""

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.results import Match, PutResult

if TYPE_CHECKING:
    from kvrouter_store.errors import KVStoreError


def chain_of(blocks: int, name: str = "chain") -> list[bytes]:
    """Block hashes that look like a chain's."""
    return [sha256(f"{name} {index}".encode()).digest() for index in range(blocks)]


class FakeClient:
    """A store client that holds block hashes, or raises what `failure` says."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.corrupt: set[bytes] = set()
        self.failure: KVStoreError | None = None
        self.calls: list[str] = []
        self.registered: list[tuple[str, str]] = []
        self.closed = False

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.failure is not None:
            raise self.failure

    def register(self, manifest: Any, engine: str = "", refusal: str = "") -> None:
        self._call("register")
        self.registered.append((engine, refusal))

    def forget(self, manifest: Any) -> None:
        """Nothing was remembered."""

    def stats(self) -> dict[str, int]:
        self._call("stats")
        return {}

    def match(self, manifest: Any, hashes: bytes) -> Match:
        self._call("match")
        names = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        missing = (index for index, name in enumerate(names) if name not in self.held)
        return Match(next(missing, len(names)))

    def put(  # noqa: PLR0917
        self, manifest: Any, part: int, hashes: bytes, span: range, segments: Any, indices: Any
    ) -> PutResult:
        self._call("put")
        assert len(indices) == len(span)
        self.held.update(hashes[32 * at : 32 * at + 32] for at in span)
        return PutResult((BlockStatus.STORED,) * len(span))

    def get_into(  # noqa: PLR0917
        self, manifest: Any, part: int, hashes: bytes, span: range, segments: Any, indices: Any
    ) -> list[BlockStatus]:
        self._call("get_into")
        assert len(indices) == len(span)
        names = [hashes[32 * at : 32 * at + 32] for at in span]
        return [
            BlockStatus.CORRUPT
            if name in self.corrupt
            else BlockStatus.OK
            if name in self.held
            else BlockStatus.MISSING
            for name in names
        ]

    def close(self) -> None:
        self.closed = True
