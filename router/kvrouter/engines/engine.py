"""An engine as the router knows it: its address, what it serves, what it holds, how it fares.

Pure state, no I/O: `probe` learns, `pool` counts, `policies` read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvrouter.openai.endpoints import GENERATION
from kvrouter.options.addresses import split_address
from kvrouter_store.identity.chain import root_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Role(StrEnum):
    """Which legs an engine may be given."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def serves(self, leg: Role) -> bool:
        """Whether an engine of this role may be given `leg` (PREFILL or DECODE)."""
        return self is Role.BOTH or self is leg


class BreakerState(StrEnum):
    """CLOSED lets all pass, OPEN none, HALF_OPEN one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class HashDomain:
    """What gives block hashes their meaning: tokens per block, and the 32-byte root of chains."""

    block_tokens: int
    root: bytes


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Where decode engines find a prefill engine.

    Attributes:
        host: name or address, an IPv6 one without brackets.
        port: TCP port.
        engine_ids: how it calls its data-parallel ranks, in their order; empty where it does not.
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
    """What one engine says it is, learnt by probes when it joins.

    Attributes:
        models: names it serves, its own first.
        max_model_len: tokens of the longest sequence, or None where it does not tell.
        block_tokens: tokens of one KV block, or None where it does not tell.
        manifest: hex digest of the set of parts it needs (the store's connector tells), or None.
        root: 32-byte root of its block hashes, or None where only the default can be assumed.
        adapters: (name, path) of the LoRA adapters among its models.
        refusal: why its connector shares no KV at all, or None where it does.
        waits: whether its connector waits for KV that it is told is coming.
        family: the dialect it was found to speak; None where it was not asked.
        can_split: whether it can do one leg of two at all.
        can_serve_whole: whether it answers a request that has no other leg.
        bootstrap: where decode engines find it, None where they need not.
        ranks: how its KV events number its data-parallel ranks, in the order in which a request
            names them (0, 1, ...); empty where it tells of none.
        version: of its server, as it tells.
        generates: whether it generates text; False: it only embeds, ranks or scores.
        endpoints: those of the router's endpoints that it has; None where it does not tell.
        takes_priority: whether it took a request with a `priority`.
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
    """The domain of its block hashes; None where it does not tell its block size."""

    def __post_init__(self) -> None:
        if self.block_tokens is not None:
            domain = HashDomain(self.block_tokens, self.root or root_hash(None))
            object.__setattr__(self, "domain", domain)

    def __str__(self) -> str:
        block = f"blocks of {self.block_tokens} tokens" if self.block_tokens else "unknown blocks"
        kv = f"manifest {self.manifest[:12]}" if self.manifest else "no connector of the store"
        spoken = f"; {self.family}" if self.family else ""
        ranks = f"; {len(self.ranks)} data-parallel ranks" if len(self.ranks) > 1 else ""
        if not self.generates:
            return f"{', '.join(self.models)}; generates no text, embeds or scores{spoken}{ranks}"
        return f"{', '.join(self.models)}; {block}; {kv}{spoken}{ranks}"

    def serves(self, path: str) -> bool:
        """Whether a request for `path` may be sent to it, as far as it tells."""
        if path in GENERATION and not self.generates:
            return False
        return self.endpoints is None or path in self.endpoints

    def adapter(self, model: str) -> tuple[str, str] | None:
        """Name and path of the adapter that `model` names, as block hashes have them."""
        return next((adapter for adapter in self.adapters if adapter[0] == model), None)


@dataclass(slots=True)
class Breaker:
    """Circuit breaker of one engine: a synchronous state machine over an injected clock.

    `threshold` failures in a row open it for `cooldown_s`, doubled each time the trial request
    fails, up to `max_cooldown_s`. After the cooldown one trial at a time passes.
    """

    clock: Callable[[], float]
    threshold: int = 3
    cooldown_s: float = 1.0
    max_cooldown_s: float = 30.0
    _failures: int = 0
    _opened: int = 0
    _retry_at: float = 0.0
    _trial: bool = False

    @property
    def state(self) -> BreakerState:
        """The state at this moment of the clock."""
        if not self._opened:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self.clock() < self._retry_at else BreakerState.HALF_OPEN

    def allows(self) -> bool:
        """Whether a request may be sent now. Changes nothing."""
        if not self._opened:
            return True
        return not self._trial and self.clock() >= self._retry_at

    def began(self) -> None:
        """Note that a request was sent: in HALF_OPEN it is the trial, others wait for it."""
        if self._opened:
            self._trial = True

    def ended(self) -> None:
        """Note that a request ended without a verdict (its client left): trials are free again."""
        self._trial = False

    def succeeded(self) -> None:
        """Note a good answer: closes the breaker and forgets the failures."""
        self._failures = self._opened = 0
        self._trial = False

    def failed(self) -> bool:
        """Note a failure; returns whether this one opened the breaker."""
        self._failures += 1
        if self._opened and not self._trial:
            return False  # a request sent before it opened: it tells nothing new
        if not self._opened and self._failures < self.threshold:
            return False
        wait_s = min(self.cooldown_s * 2.0**self._opened, self.max_cooldown_s)
        self._retry_at = self.clock() + wait_s
        self._opened += 1
        self._trial = False
        return True


@dataclass(eq=False, slots=True)
class Engine:
    """What a leg can be sent to: a server, or one data-parallel rank of a server that has several.

    Compared and hashed by identity; owned by the pool, which alone changes counts.

    Attributes:
        address: `HOST:PORT`, its one name in metrics, logs and topics of KV events; of a rank
            `HOST:PORT@RANK`.
        role: which legs it may be given.
        tls: whether it is reached by HTTPS; a server's.
        family: dialect it speaks, a name in `FAMILIES`; its identity's where that
            tells.
        identity: what it said when it joined; None while it has not.
        requests: requests under way on it from this router.
        tokens: tokens under way on it, as reserved, from this router and from others.
        remote_tokens: those of them that other routers report.
        computing_tokens: prompt tokens that its decode legs have still to compute.
        joins: how often it has joined the pool.
        draining: whether it gets no new legs because it is to leave for good; a server's.
        ranks: of a server with several data-parallel ranks, these: they get the legs.
        rank: of a rank, its place among them, as requests name it.
        number: how its KV events number it, and by how much their port is moved.
        server: whose rank it is; itself where it is none.
        rank_line: header line by which a request goes to this rank; empty where there are none.
        known: every rank that the server ever had, by `rank` and `number`.
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
    number: int = 0
    host: str = field(init=False)
    port: int = field(init=False)
    server: Engine = field(init=False)
    rank_line: bytes = field(init=False, default=b"")
    known: dict[tuple[int, int], Engine] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.host, self.port = split_address(self.address)
        self.server = self

    def __repr__(self) -> str:
        return (
            f"<Engine {self.address} {self.role}: {self.requests} requests, {self.tokens} tokens>"
        )

    @property
    def url(self) -> str:
        """Base URL of its server, without a slash at its end."""
        return f"{'https' if self.server.tls else 'http'}://{self.server.address}"

    @property
    def manifest(self) -> str | None:
        """Hex digest of its manifest, None where unknown."""
        return self.identity.manifest if self.identity else None

    @property
    def targets(self) -> tuple[Engine, ...]:
        """What legs are sent to: its ranks, or itself."""
        return self.ranks or (self,)

    def numbered(self, number: int) -> Engine | None:
        """The target whose KV events bear that number; None where it has no such rank."""
        if not self.ranks:
            return self
        return next((each for each in self.ranks if each.number == number), None)

    def divide(self, numbers: Sequence[int]) -> None:
        """Have a rank for each of `numbers`, where these are several: the one it had, or a new one.

        Args:
            numbers: as `Identity.ranks`.
        """
        self.number = numbers[0] if len(numbers) == 1 else 0
        self.ranks = ()
        if len(numbers) > 1:
            self.ranks = tuple(self._rank(*place) for place in enumerate(numbers))

    def _rank(self, rank: int, number: int) -> Engine:
        made = self.known.get((rank, number))
        if made is None:
            address = f"{self.address}@{rank}"
            made = Engine(address, self.role, self.family, rank=rank, number=number)
            made.server = self
            made.rank_line = b"x-data-parallel-rank: %d\r\n" % rank
            self.known[rank, number] = made
        return made
