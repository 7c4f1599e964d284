"""The pool of engines: which have joined, which may be used, and the load of each.

A synchronous state machine over an injected clock; it does no I/O. Probes and legs report what
happened; policies read the load.
"""

from __future__ import annotations

import time
from collections import ChainMap, Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvrouter.engines.breaker import Breaker, BreakerLimits, BreakerState, Pairs
from kvrouter.engines.compatibility import partners
from kvrouter.engines.engine import Engine, HashDomain, Identity, Role
from kvrouter.http.failure import Failure
from kvrouter.options.addresses import SECURE, bare_address, label_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Callback = Callable[[Engine], None]
    Cause = Literal["silent", "stalled", "check", "refused", "changed", "removed"]
    EngineChange = Literal[
        "joined", "left", "draining", "removed", "breaker open", "breaker closed"
    ]


@dataclass(eq=False, slots=True)
class Ticket:
    """A leg's reservation on an engine, made by `EnginePool.reserve`; its owner must release it.

    Its tokens count from the reservation on, the request from `begin` on. `computing_tokens` are
    those of the prompt that a decode leg has still to compute.
    """

    _pool: EnginePool | None  # None: it is released
    engine: Engine
    tokens: int
    computing_tokens: int
    prefill: bool
    work_s: float
    begun: bool = False

    def begin(self) -> None:
        """Count the leg as in flight from now on. Idempotent; no effect after `release`."""
        if self._pool is not None and not self.begun:
            self.begun = True
            self.engine.server.prefills += self.prefill
            self._pool._began(self.engine)

    def computed(self) -> None:
        """The prompt is computed. Idempotent."""
        if self.computing_tokens:
            self.engine.computing_tokens -= self.computing_tokens
            self.computing_tokens = 0
            if self._pool is not None:
                self._pool.load_fell()

    def release(self) -> None:
        """Give the reservation back. Idempotent."""
        self.computed()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._released(self)


@dataclass(eq=False)
class EnginePool:
    """Engines by address, with their health, breakers and load."""

    clock: Callable[[], float] = time.monotonic  # seconds
    breaker_limits: BreakerLimits = field(default_factory=BreakerLimits)  # may change
    nodes: ChainMap[str, str] = field(default_factory=ChainMap)  # see `Engine`; may change

    def __post_init__(self) -> None:
        self.pairs = Pairs(self.clock, self.breaker_limits)
        self._engines: dict[str, Engine] = {}
        self._ready: dict[tuple[str, str | None], tuple[Engine, ...]] = {}
        self._unsettled: set[Engine] = set()  # those that failed since they last answered well
        self._domains: dict[str, HashDomain | None] = {}  # by model, as far as asked for
        self._join_callbacks: list[Callback] = []
        self._leave_callbacks: list[Callback] = []
        self._remove_callbacks: list[Callback] = []
        self._models_callbacks: list[Callback] = []
        self._change_callbacks: list[Callable[[EngineChange, Engine], None]] = []
        self.load_fell: Callable[[], None] = _nothing  # called when a leg or a computation ended

    def on_join(self, callback: Callback) -> None:
        """Call `callback` with each engine that joins; its identity is known."""
        self._join_callbacks.append(callback)

    def on_leave(self, callback: Callback) -> None:
        """Call `callback` with each engine that leaves: what its cache held is lost."""
        self._leave_callbacks.append(callback)

    def on_remove(self, callback: Callback) -> None:
        """Call `callback` with each engine that is removed for good, after it has left."""
        self._remove_callbacks.append(callback)

    def on_models_change(self, callback: Callback) -> None:
        """Call `callback` with each engine in the pool whose models changed."""
        self._models_callbacks.append(callback)

    def on_change(self, callback: Callable[[EngineChange, Engine], None]) -> None:
        """Call `callback` with what people want to know: of servers, and of breakers of ranks."""
        self._change_callbacks.append(callback)

    # -- membership

    def add(self, address: str, role: Role, family: str = "store") -> Engine:
        """Name an engine to be probed; it may be used only after `join`.

        An address that is known with the other role becomes an engine for both legs.
        """
        name = bare_address(address)
        engine = self._engines.get(name)
        if engine is None:
            tls = SECURE in address
            engine = Engine(name, role, family, breaker=self._breaker(), tls=tls, nodes=self.nodes)
            self._engines[name] = engine
        elif engine.role is not role:
            engine.role = Role.BOTH
            self._ready.clear()
        engine.label = label_of(address) or engine.label
        return engine

    def assign(self, address: str, role: Role) -> Engine:
        """The engine of that address with exactly that role; made if it is new.

        It drains no longer. Its legs go on, unless the scheme (HTTP, HTTPS) changed: that makes it
        another engine.
        """
        known, secure = self.find(address), SECURE in address
        if known is not None and known.tls is not secure:
            self.remove(known)
        engine = self.add(address, role)
        engine.label = label_of(address)
        for each in (engine, *engine.ranks):
            each.role = role
        engine.draining = False
        self._changed()
        return engine

    def drain(self, engine: Engine) -> bool:
        """Give `engine` no new legs; remove it after its last. Returns whether it is gone."""
        engine.draining = True
        self._changed()
        if not engine.requests:
            self._remove(engine)
        else:
            self._tell("draining", engine)
        return not engine.requests

    def remove(self, engine: Engine) -> None:
        """Remove `engine` now, even with legs in flight. Tickets stay valid."""
        engine.draining = True
        self._changed()
        self._remove(engine)

    def join(self, engine: Engine, identity: Identity) -> bool:
        """`engine` answered its probes; returns whether it is new or changed.

        An engine with another identity than before was restarted: it leaves first, because what its
        cache held is lost.
        """
        if engine.identity == identity:
            return False
        if engine.identity is not None:
            self.leave(engine, "changed")
        engine.set_ranks(identity.ranks)
        for each in (engine, *engine.ranks):
            each.identity = identity
            each.joins += 1
            each.family = identity.family or each.family
            each.role = engine.role
            each.breaker = self._breaker()
            self._unsettled.discard(each)
        self._changed()
        _call(self._join_callbacks, engine.targets)
        self._tell("joined", engine)
        return True

    def update_models(self, engine: Engine, identity: Identity) -> None:
        """`engine`, which is in the pool, now has `identity`, which differs in its models alone.

        It keeps its breaker, its load and what is known of its cache.
        """
        for each in (engine, *engine.ranks):
            each.identity = identity
        self._changed()
        _call(self._models_callbacks, engine.targets)

    def leave(self, engine: Engine, cause: Cause = "changed", why: str = "") -> bool:
        """The server of `engine` is gone; returns whether it was here. Tickets stay valid."""
        server = engine.server
        if server.identity is None:
            return False
        server.left_for, server.left_why = cause, why
        server.models_before = server.identity.models
        for each in (server, *server.ranks):
            each.identity = None
            self._unsettled.discard(each)
        self.pairs.left((server, *server.ranks))
        self._changed()
        _call(self._leave_callbacks, server.targets)
        if not server.draining:  # then "removed" follows
            self._tell("left", server)
        return True

    # -- lookup

    def has_role(self, role: Role, model: str | None = None) -> bool:
        """Whether an engine for the leg `role` of `model` is configured, in the pool or not.

        An engine that is away serves what it did; one that never was here may serve any model.
        """
        for engine in self._engines.values():
            if engine.role.serves(role) and not engine.draining:
                models = engine.identity.models if engine.identity else engine.models_before
                if model is None or not models or model in models:
                    return True
        return False

    def all(self) -> tuple[Engine, ...]:
        """Every configured engine, joined or not; the server of those with ranks."""
        return tuple(self._engines.values())

    def targets(self) -> Iterator[Engine]:
        """What legs are sent to: every configured engine, or its ranks."""
        for engine in self._engines.values():
            yield from engine.targets

    def find(self, address: str) -> Engine | None:
        """The configured engine of an address, whatever its scheme."""
        return self._engines.get(bare_address(address))

    def target(self, address: str) -> Engine | None:
        """The target named `HOST:PORT` or `HOST:PORT@RANK`."""
        server = self._engines.get(address.partition("@")[0])
        targets = server.targets if server is not None else ()
        return next((target for target in targets if target.address == address), None)

    def engines(self, role: Role, model: str | None = None) -> Sequence[Engine]:
        """Engines that may serve the leg `role` now, for `model` (None: any model)."""
        ready = self._ready.get((role, model))  # the usual case; asked three times per request
        if ready is not None and not self._unsettled and not self.pairs:
            return ready
        found = self._find(role, role, model, lambda identity: identity.generates)
        return self._paired(found, model) if role is Role.DECODE and self.pairs else found

    def serving(self, path: str, model: str | None = None) -> Sequence[Engine]:
        """Decode engines that serve the endpoint `path` for `model` now; see `Identity.serves`."""
        return self._find(path, Role.DECODE, model, lambda identity: identity.serves(path))

    def _find(
        self, key: str, role: Role, model: str | None, able: Callable[[Identity], bool]
    ) -> Sequence[Engine]:
        """Engines of `role` that are in the pool and able; cached by `key` and `model`."""
        ready = self._ready.get((key, model))
        if ready is None:
            ready = self._ready[key, model] = tuple(
                target
                for e in self._engines.values()
                if e.identity is not None
                and not e.draining
                and e.role.serves(role)
                and (model is None or model in e.identity.models)
                and able(e.identity)
                for target in e.targets
            )
        if not self._unsettled:
            return ready
        return tuple(e for e in ready if e.breaker is None or e.breaker.allows())

    def _paired(self, decode: Sequence[Engine], model: str | None) -> Sequence[Engine]:
        """Those for which there is a prefill engine, as far as breakers of pairs say; else all."""
        prefill = self.engines(Role.PREFILL, model)
        able = tuple(e for e in decode if e not in self.pairs or partners(prefill, e, model))
        return able or decode

    @property
    def next_trial_s(self) -> float | None:
        """When, on the clock, a breaker will let a request pass; None: none is open."""
        breakers = (engine.breaker for engine in self._unsettled if engine.breaker is not None)
        times_s = (breaker.retry_s for breaker in breakers)
        return min((at_s for at_s in times_s if at_s is not None), default=None)

    def domain(self, model: str) -> HashDomain | None:
        """The hash domain of most engines of `model`, decode engines first; None: unknown.

        The router hashes prompts for the model in it.
        """
        if model not in self._domains:
            self._domains[model] = self._vote(model)
        return self._domains[model]

    def domain_of(self, engine: Engine) -> HashDomain | None:
        """The hash domain of a model of `engine`: one with blocks of its size, if there is one."""
        identity = engine.identity
        if identity is None:
            return None
        for domain in map(self.domain, identity.models):
            if domain is not None and domain.block_tokens == identity.block_tokens:
                return domain
        return self.domain(identity.models[0])

    def models(self) -> tuple[str, ...]:
        """Names of all models that joined engines serve, each once, in order of joining."""
        names = (m for e in self._engines.values() if e.identity for m in e.identity.models)
        return tuple(dict.fromkeys(names))

    # -- load and failures

    def reserve(
        self,
        engine: Engine,
        tokens: int,
        *,
        begun: bool = True,
        computing_tokens: int = 0,
        prefill: bool = False,
        work_s: float = 0.0,
    ) -> Ticket:
        """Count `tokens` and a leg on `engine` until the ticket is released.

        Not `begun`: the leg is only planned, and `Ticket.begin` counts it as in flight. A `prefill`
        leg is estimated to take `work_s`.
        """
        engine.legs += 1
        engine.tokens += tokens
        engine.computing_tokens += computing_tokens
        if engine.server is not engine:
            engine.server.tokens += tokens
        if prefill:
            engine.prefilling.add(tokens, work_s, self.clock())
        ticket = Ticket(self, engine, tokens, computing_tokens, prefill, work_s)
        if begun:
            ticket.begin()
        return ticket

    def set_remote_load(
        self, engine: Engine, tokens: int, prefills: tuple[int, int, float] = (0, 0, 0.0)
    ) -> None:
        """Other routers have `tokens` in flight on `engine`, in total; policies count them too.

        `prefills`: legs, tokens and estimated seconds of their prefill legs there.
        """
        engine.tokens += tokens - engine.remote_tokens
        engine.remote_tokens = tokens
        if prefills != engine.prefilling.remote and engine.prefilling.tell(prefills, self.clock()):
            self.load_fell()

    def succeeded(self, engine: Engine) -> None:
        """A leg on `engine` was answered well."""
        if engine in self._unsettled:
            self._unsettled.discard(engine)
            if engine.breaker is not None:
                closes = engine.breaker.state is not BreakerState.CLOSED
                engine.breaker.succeeded()
                if closes:
                    self._tell("breaker closed", engine)

    def failed(self, engine: Engine, reason: Failure) -> bool:
        """A leg on `engine` failed; returns whether `engine` may no longer be used.

        REFUSED means that its process is gone: it leaves at once, and joins again by its probe. One
        that was found DEAD has left.
        Other failures count in its breaker.
        """
        if reason is Failure.REFUSED:
            return self.leave(engine, "refused")
        if reason is Failure.DEAD or engine.identity is None or engine.breaker is None:
            return False
        self._unsettled.add(engine)
        opens = engine.breaker.failed()
        if opens:
            self._tell("breaker open", engine)
        return opens

    def proven(self, engine: Engine, reason: Failure, source: Engine | None = None) -> None:
        """A failure that ended without a verdict is the engine's: another one did well.

        If it was to fetch KV from `source`, it is the pair's.
        """
        if source is not None:
            self.pairs.failed(source, engine)
            return
        if engine.breaker is not None and engine.breaker.state is BreakerState.HALF_OPEN:
            engine.breaker.began()  # it was the trial
        self.failed(engine, reason)

    def state(self, engine: Engine) -> BreakerState | None:
        """The state of its breaker; None while it is not in the pool."""
        if engine.identity is None or engine.breaker is None:
            return None
        return engine.breaker.state

    def down(self, engine: Engine) -> bool:
        """Whether no leg can be sent to `engine`: it is away, or its breakers are open."""
        return all(self.state(each) in (None, BreakerState.OPEN) for each in engine.targets)

    def busy_s(self, engine: Engine) -> float:
        """Seconds in which the server `engine` had legs of this router; only grows."""
        return engine.busy_s + (self.clock() if engine.requests else 0.0)

    def _tell(self, change: EngineChange, engine: Engine) -> None:
        for callback in self._change_callbacks:
            callback(change, engine)

    def _breaker(self) -> Breaker:
        return Breaker(self.clock, self.breaker_limits)

    def _changed(self) -> None:
        self._ready.clear()
        self._domains.clear()

    def _vote(self, model: str) -> HashDomain | None:
        votes: dict[bool, Counter[HashDomain]] = {True: Counter(), False: Counter()}
        for engine in self._engines.values():
            identity = engine.identity
            if identity is None or engine.draining or model not in identity.models:
                continue
            if identity.domain is not None:
                votes[engine.role.serves(Role.DECODE)][identity.domain] += 1
        counted = votes[True] or votes[False]
        return counted.most_common(1)[0][0] if counted else None

    def _began(self, engine: Engine) -> None:
        server = engine.server
        if not server.requests:
            server.busy_s -= self.clock()
        engine.requests += 1
        if server is not engine:
            server.requests += 1
        if engine in self._unsettled and engine.breaker is not None:
            engine.breaker.began()

    def _released(self, ticket: Ticket) -> None:
        engine, server = ticket.engine, ticket.engine.server
        engine.legs -= 1
        engine.tokens -= ticket.tokens
        if server is not engine:
            server.tokens -= ticket.tokens
        if ticket.prefill:
            engine.prefilling.end(ticket.tokens, ticket.work_s, self.clock())
        self.load_fell()
        if not ticket.begun:
            return
        engine.requests -= 1
        server.prefills -= ticket.prefill
        if server is not engine:
            server.requests -= 1
        if not server.requests:
            server.busy_s += self.clock()
        if server.draining and not server.requests:
            self._remove(server)
        if engine in self._unsettled and engine.breaker is not None:
            engine.breaker.ended()

    def _remove(self, engine: Engine) -> None:
        if self._engines.get(engine.address) is not engine:
            return
        self.leave(engine, "removed")
        del self._engines[engine.address]
        _call(self._remove_callbacks, (engine,))
        self._tell("removed", engine)


def _nothing() -> None:
    """Nobody waits for engines to have less load."""


def _call(callbacks: Sequence[Callback], engines: Sequence[Engine]) -> None:
    for engine in engines:
        for callback in callbacks:
            callback(engine)
