"""Stand-ins for what vLLM and the store hand to the connector. They record; nothing is copied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.results import Match, PutResult
from kvrouter_store.connectors.landings import AwaitedPrefix
from kvrouter_store.connectors.vllm.identity import EngineIdentity
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.chain import root_hash
from kvrouter_store.identity.layout import Layout

if TYPE_CHECKING:
    from kvrouter_store.errors import KVStoreError


def chain_of(blocks: int, name: str = "chain") -> list[bytes]:
    """Block hashes that look like a chain's."""
    return [sha256(f"{name} {index}".encode()).digest() for index in range(blocks)]


def identity(block_tokens: int, refusal: str = "") -> EngineIdentity:
    """Who an engine of one rank is."""
    root = root_hash(None).hex()
    spec = CacheSpec("tiny", "r1", "float32", block_tokens, "sha256_cbor", root)
    part = Part((0, 4), (0, 2), 0, 4096, Layout.opaque("test"))
    return EngineIdentity(Manifest(spec, (part,)), refusal, "engine")


@dataclass
class FakeRequest:
    """What the connector reads of vLLM's Request."""

    request_id: str = "r"
    block_hashes: list[bytes] = field(default_factory=list)
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    prompt_token_ids: list[int] | None = None
    prompt_embeds: Any = None
    pooling_params: Any = None
    lora_request: Any = "an adapter: hashes are then not checked against kvstore's own"
    mm_features: Sequence[Any] = ()
    cache_salt: str | None = None
    resumable: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False


def request_of(tokens: int, block_tokens: int, request_id: str = "r", **more: Any) -> FakeRequest:
    """A request of `tokens` prompt tokens with the hashes of its full blocks."""
    hashes = chain_of(tokens // block_tokens, request_id)
    return FakeRequest(request_id, hashes, num_tokens=tokens, num_prompt_tokens=tokens, **more)


@dataclass
class FakeOutput:
    """What the connector reads of vLLM's SchedulerOutput: tokens and block ids by request."""

    num_scheduled_tokens: Mapping[str, int]
    blocks: Mapping[str, list[int]] = field(default_factory=dict)

    @property
    def kv_connector_block_state(self) -> "FakeOutput":
        return self

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        found = self.blocks.get(request_id)
        return None if found is None else (found,)


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


class FakeLandings:
    """Follows landings as the connectors' `Landings` does; the test says what lands."""

    def __init__(self) -> None:
        self.followed: list[tuple[AwaitedPrefix, float]] = []
        self.waits: list[float] = []

    def follow(self, hashes: bytes, first: int, wait_s: float) -> AwaitedPrefix:
        coming = AwaitedPrefix(hashes, first)
        self.followed.append((coming, wait_s))
        return coming

    def news(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return False

    @property
    def coming(self) -> AwaitedPrefix:
        return self.followed[-1][0]


class FakeTensor:
    """What the connector reads of a layer's KV tensor: bytes, block index outermost."""

    def __init__(
        self,
        shape: tuple[int, ...],
        address: int,
        *,
        stride: int = 0,
        device: str = "cpu",
        contiguous: bool = True,
    ) -> None:
        self.shape = shape
        self.address = address
        self.device = SimpleNamespace(type=device)
        self.contiguous = contiguous
        self.strides = stride or prod(shape[1:])

    def __getitem__(self, index: int) -> "FakeBlock":
        return FakeBlock(prod(self.shape[1:]), self.contiguous)

    def stride(self, dimension: int | None = None) -> Any:
        return (self.strides, 1) if dimension is None else (self.strides, 1)[dimension]

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return self.address


@dataclass
class FakeBlock:
    """One block of a FakeTensor."""

    size: int
    contiguous: bool

    def is_contiguous(self) -> bool:
        return self.contiguous

    def numel(self) -> int:
        return self.size
