"""An engine as the router knows it: address, identity, load and ranks. Pure state, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING

from kvrouter.openai.endpoints import GENERATION, KNOWN
from kvrouter.options.addresses import split_address
from kvrouter_store.identity.chain import root_hash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrouter.engines.breaker import Breaker, PairBreaker


class Role(StrEnum):
    """Which legs an engine may serve."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    STORE = "store"  # none: what has it is no engine, but a node of the store

    def serves(self, leg: Role) -> bool:
        """Whether an engine of this role may serve `leg` (PREFILL or DECODE)."""
        return self is Role.BOTH or self is leg


@dataclass(frozen=True, slots=True)
class HashDomain:
    """What gives block hashes their meaning: tokens per block, and the 32-byte root of chains."""

    block_tokens: int
    root: bytes


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of a model whose KV is stored under a manifest of their own, named by hex digest.

    `reach`: how many trailing blocks of a prefix are enough to go on from (a sliding window, a
    recurrent state); None: all of them.
    """

    manifest: str
    reach: int | None = None


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The server by which decode engines find a prefill engine."""

    host: str  # IPv6 without brackets
    port: int
    engine_ids: tuple[str, ...] = ()  # the engine's names of its data-parallel ranks, in order

    @property
    def bracketed(self) -> str:
        """The host as it stands before a port: an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host


@dataclass(frozen=True, slots=True)
class Identity:
    """What detection found out about an engine when it joined. None: the engine does not say."""

    models: tuple[str, ...]  # names it serves, the base model first
    max_model_len: int | None = None  # tokens of the longest sequence
    block_tokens: int | None = None
    manifest: str | None = None  # of the parts it needs: a hex digest, or a store's own name
    root: bytes | None = None  # of its block hashes, 32 bytes; None: the default root
    adapters: tuple[tuple[str, str], ...] = ()  # (name, path) of the LoRA adapters in `models`
    refusal: str | None = None  # why its connector shares no KV; None: it shares
    waits: bool = False  # whether its connector can wait for KV that is still on its way
    family: str | None = None
    can_split: bool = True  # whether it can serve one leg of two
    can_serve_whole: bool = True  # whether it can serve a request without the other leg
    bootstrap: Bootstrap | None = None
    ranks: tuple[int, ...] = ()  # of data parallelism: their numbers in KV events, in order
    version: str | None = None  # of its server
    generates: bool = True  # False: it only embeds, ranks or scores
    endpoints: frozenset[str] | None = None  # those of the router's endpoints that it has
    salted: frozenset[str] | None = None  # paths that read a `cache_salt`
    takes_priority: bool = False  # whether it accepted a request with a `priority`
    kv_tokens: int | None = None  # that its KV cache holds, on all ranks together
    groups: tuple[CacheGroup, ...] = ()  # what `manifest` stands for, where it is not alone
    node: str | None = None  # URL of the store node that its connector writes to
    model_path: str | None = None  # what it was started with as its model
    event_ports: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Where it says that its ranks publish KV events, and repeat them (0: nowhere), by rank."""
    events_refused: str | None = None  # why not all that it says of that is used
    domain: HashDomain | None = field(init=False, compare=False, repr=False, default=None)

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
        kv += f" of {len(self.groups)} cache groups" if len(self.groups) > 1 else ""
        return f"{', '.join(self.models)}; {block}; {kv}{family}{ranks}"

    def serves(self, path: str) -> bool:
        """Whether a request for `path` may be sent to it, as far as is known."""
        if path in GENERATION and not self.generates:
            return False
        return path in (KNOWN if self.endpoints is None else self.endpoints)

    def adapter(self, model: str) -> tuple[str, str] | None:
        """Name and path of the adapter named `model`, as block hashes contain them."""
        return next((adapter for adapter in self.adapters if adapter[0] == model), None)


@dataclass(slots=True)
class PrefillLoad:
    """Prefill legs on an engine, from their plan on; those of other routers as far as they tell."""

    legs: int = 0
    tokens: int = 0  # to be computed
    work_s: float = 0.0  # estimated
    since_s: float = -inf  # when the last one ended, or the first one of these was planned
    ran_s: float = 0.0  # how long the last one ran, if it was alone then; else 0
    remote: tuple[int, int, float] = (0, 0, 0.0)  # legs, tokens and work of other routers

    def add(self, tokens: int, work_s: float, now_s: float) -> None:
        """A leg is planned."""
        if not self.legs:
            self.since_s = now_s
        self.legs += 1
        self.tokens += tokens
        self.work_s += work_s

    def end(self, tokens: int, work_s: float, now_s: float) -> None:
        """A leg has ended."""
        self.ran_s = now_s - self.since_s if self.legs == 1 else 0.0
        self.legs -= 1
        self.tokens -= tokens
        self.work_s = self.work_s - work_s if self.legs else 0.0
        self.since_s = now_s

    def tell(self, remote: tuple[int, int, float], now_s: float) -> bool:
        """Other routers have these legs, tokens and work there, in total; whether legs ended."""
        (legs, tokens, work_s), before = remote, self.remote
        if not self.legs or legs < before[0]:
            self.since_s = now_s
        self.legs += legs - before[0]
        self.tokens += tokens - before[1]
        self.work_s += work_s - before[2]
        self.remote = remote
        return legs < before[0]

    @property
    def own(self) -> tuple[int, int, float]:
        """Legs, tokens and work of this router."""
        legs, tokens, work_s = self.remote
        return self.legs - legs, self.tokens - tokens, self.work_s - work_s


@dataclass(eq=False, slots=True)
class Engine:
    """What a leg can be sent to: a server, or one data-parallel rank of a server with several.

    Compared and hashed by identity. The pool owns it and alone changes its counts.
    """

    address: str  # `HOST:PORT`, of a rank `HOST:PORT@RANK`: its name in metrics, logs and topics
    role: Role
    family: str = "store"  # a name in `FAMILIES`
    identity: Identity | None = None  # None while it is not in the pool
    models_before: tuple[str, ...] = ()  # that it served when it was last in the pool
    breaker: Breaker | None = None
    pairs: dict[Engine, PairBreaker] = field(default_factory=dict)
    """By prefill engine, where this one lately failed to fetch KV: see `Pairs`, which owns them."""
    legs: int = 0  # of this router, planned or in flight
    requests: int = 0  # of this router, in flight
    busy_s: float = 0.0  # a server's time with legs of this router; with some, less their beginning
    tokens: int = 0  # reserved on it, by this router and by others
    remote_tokens: int = 0  # those of them that other routers report
    computing_tokens: int = 0  # prompt tokens that its decode legs have still to compute
    prefilling: PrefillLoad = field(default_factory=PrefillLoad)
    joins: int = 0  # how often it has joined the pool
    left_for: str = ""  # the cause for which it last left the pool
    left_why: str = ""  # the same in a sentence, where it was found dead
    prefills: int = 0  # those of a server's `requests` that are prefill legs
    draining: bool = False  # a server that gets no new legs, because it is to leave for good
    tls: bool = False  # a server that is reached by HTTPS
    label: str = ""  # what its operator calls it; "": nothing
    ranks: tuple[Engine, ...] = ()  # of a server with several data-parallel ranks
    rank: int | None = None  # of a rank: its number in requests
    event_rank: int = 0  # its number in KV events, which is also added to their port
    nodes: Mapping[str, str] = field(default_factory=dict)
    """URLs of the store nodes on the hosts of servers, by their addresses, where they are known."""
    host: str = field(init=False)
    port: int = field(init=False)
    server: Engine = field(init=False)  # of a rank; else itself
    rank_line: bytes = field(init=False, default=b"")  # the header line that selects this rank
    all_ranks: dict[tuple[int, int], Engine] = field(init=False, default_factory=dict)
    """Every rank that the server ever had, by `rank` and `event_rank`."""

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
        """The name of its manifest; None: unknown."""
        return self.identity.manifest if self.identity else None

    @property
    def node(self) -> str | None:
        """URL of the store node that its connector writes to; None: unknown."""
        told = self.identity.node if self.identity else None
        return told or self.server.nodes.get(self.server.address)

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that its own KV cache holds; None: unknown."""
        told = self.identity.kv_tokens if self.identity else None
        return told // (len(self.server.ranks) or 1) if told else None

    @property
    def event_ports(self) -> tuple[int, int] | None:
        """Where it says that it publishes KV events, and repeats them; None: it does not say."""
        return self.identity.event_ports.get(self.event_rank) if self.identity else None

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
