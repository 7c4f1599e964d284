"""An engine as the router knows it: address, identity, load and ranks. Pure state, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvrouter.openai.endpoints import GENERATION
from kvrouter.options.addresses import split_address
from kvrouter_store.identity.chain import root_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.engines.breaker import Breaker


class Role(StrEnum):
    """Which legs an engine may serve."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def serves(self, leg: Role) -> bool:
        """Whether an engine of this role may serve `leg` (PREFILL or DECODE)."""
        return self is Role.BOTH or self is leg


@dataclass(frozen=True, slots=True)
class HashDomain:
    """What gives block hashes their meaning: tokens per block, and the 32-byte root of chains."""

    block_tokens: int
    root: bytes


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The server by which decode engines find a prefill engine.

    Attributes:
        host: name or address; IPv6 without brackets.
        port: TCP port.
        engine_ids: the engine's names of its data-parallel ranks, in order; may be empty.
    """

    host: str
    port: int
    engine_ids: tuple[str, ...] = ()

    @property
    def bracketed(self) -> str:
        """The host as it stands before a port: an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host


@dataclass(frozen=True, slots=True)
class Identity:
    """What detection found out about an engine when it joined. None: the engine does not say.

    Attributes:
        models: names it serves, the base model first.
        max_model_len: tokens of the longest sequence.
        block_tokens: tokens of one KV block.
        manifest: hex digest of the parts it needs, as the store's connector reports it.
        root: 32-byte root of its block hashes; None: the default root.
        adapters: (name, path) of the LoRA adapters among its models.
        refusal: why its connector shares no KV; None: it shares.
        waits: whether its connector can wait for KV that is still on its way.
        family: name of its family.
        can_split: whether it can serve one leg of two.
        can_serve_whole: whether it can serve a request without the other leg.
        bootstrap: where decode engines find it, if they need to.
        ranks: numbers of its data-parallel ranks in its KV events, in the order in which requests
            name the ranks (0, 1, ...).
        version: of its server.
        generates: whether it generates text; False: it only embeds, ranks or scores.
        endpoints: those of the router's endpoints that it has.
        takes_priority: whether it accepted a request with a `priority`.
    """

    models: tuple[str, ...]
    max_model_len: int | None = None
    block_tokens: int | None = None
    manifest: str | None = None
    root: bytes | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    refusal: str | None = None
    waits: bool = False
    family: str | None = None
    can_split: bool = True
    can_serve_whole: bool = True
    bootstrap: Bootstrap | None = None
    ranks: tuple[int, ...] = ()
    version: str | None = None
    generates: bool = True
    endpoints: frozenset[str] | None = None
    takes_priority: bool = False
    domain: HashDomain | None = field(init=False, compare=False, repr=False, default=None)
    """Domain of its block hashes; None while its block size is unknown."""

    def __post_init__(self) -> None:
        if self.block_tokens is not None:
            domain = HashDomain(self.block_tokens, self.root or root_hash(None))
            object.__setattr__(self, "domain", domain)

    def __str__(self) -> str:
        family = f"; {self.family}" if self.family else ""
        ranks = f"; {len(self.ranks)} data-parallel ranks" if len(self.ranks) > 1 else ""
        if not self.generates:
            return f"{', '.join(self.models)}; generates no text, embeds or scores{family}{ranks}"
        block = f"blocks of {self.block_tokens} tokens" if self.block_tokens else "unknown blocks"
        kv = f"manifest {self.manifest[:12]}" if self.manifest else "no connector of the store"
        return f"{', '.join(self.models)}; {block}; {kv}{family}{ranks}"

    def serves(self, path: str) -> bool:
        """Whether a request for `path` may be sent to it, as far as is known."""
        if path in GENERATION and not self.generates:
            return False
        return self.endpoints is None or path in self.endpoints

    def adapter(self, model: str) -> tuple[str, str] | None:
        """Name and path of the adapter named `model`, as block hashes contain them."""
        return next((adapter for adapter in self.adapters if adapter[0] == model), None)


@dataclass(eq=False, slots=True)
class Engine:
    """What a leg can be sent to: a server, or one data-parallel rank of a server with several.

    Compared and hashed by identity. The pool owns it and alone changes its counts.

    Attributes:
        address: `HOST:PORT`, or `HOST:PORT@RANK` of a rank: its name in metrics, logs and topics.
        role: which legs it may serve.
        family: name in `FAMILIES`.
        identity: None while it is not in the pool.
        requests: requests of this router in flight on it.
        tokens: tokens reserved on it, by this router and by others.
        remote_tokens: those of them that other routers report.
        computing_tokens: prompt tokens that its decode legs have still to compute.
        joins: how often it has joined the pool.
        draining: whether it gets no new legs because it is to leave for good; a server's.
        tls: whether it is reached by HTTPS; a server's.
        ranks: the ranks of a server with several; they get the legs.
        rank: of a rank, its place among them, as requests name it.
        event_rank: its number in KV events, which is also added to their port.
        server: the server of a rank; else itself.
        rank_line: header line that sends a request to this rank; empty without ranks.
        all_ranks: every rank that the server ever had, by `rank` and `event_rank`.
    """

    address: str
    role: Role
    family: str = "store"
    identity: Identity | None = None
    breaker: Breaker | None = None
    requests: int = 0
    tokens: int = 0
    remote_tokens: int = 0
    computing_tokens: int = 0
    joins: int = 0
    draining: bool = False
    tls: bool = False
    ranks: tuple[Engine, ...] = ()
    rank: int | None = None
    event_rank: int = 0
    host: str = field(init=False)
    port: int = field(init=False)
    server: Engine = field(init=False)
    rank_line: bytes = field(init=False, default=b"")
    all_ranks: dict[tuple[int, int], Engine] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.host, self.port = split_address(self.address)
        self.server = self

    def __repr__(self) -> str:
        return (
            f"<Engine {self.address} {self.role}: {self.requests} requests, {self.tokens} tokens>"
        )

    @property
    def url(self) -> str:
        """Base URL of its server, without a trailing slash."""
        return f"{'https' if self.server.tls else 'http'}://{self.server.address}"

    @property
    def manifest(self) -> str | None:
        """Hex digest of its manifest; None: unknown."""
        return self.identity.manifest if self.identity else None

    @property
    def targets(self) -> tuple[Engine, ...]:
        """What legs are sent to: its ranks, or itself."""
        return self.ranks or (self,)

    def rank_of_events(self, event_rank: int) -> Engine | None:
        """The target whose KV events carry that number; itself if it has no ranks."""
        if not self.ranks:
            return self
        return next((each for each in self.ranks if each.event_rank == event_rank), None)

    def set_ranks(self, event_ranks: Sequence[int]) -> None:
        """Set its ranks, by their numbers as in `Identity.ranks`; a single rank is the server."""
        self.event_rank = event_ranks[0] if len(event_ranks) == 1 else 0
        self.ranks = ()
        if len(event_ranks) > 1:
            self.ranks = tuple(self._rank(*place) for place in enumerate(event_ranks))

    def _rank(self, rank: int, event_rank: int) -> Engine:
        made = self.all_ranks.get((rank, event_rank))
        if made is None:
            address = f"{self.address}@{rank}"
            made = Engine(address, self.role, self.family, rank=rank, event_rank=event_rank)
            made.server = self
            made.rank_line = b"x-data-parallel-rank: %d\r\n" % rank
            self.all_ranks[rank, event_rank] = made
        return made
