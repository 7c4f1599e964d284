"""The pool of engines: who has joined, who may be asked, and what is under way on each.

A synchronous state machine over an injected clock; it does no I/O. Health checks (`probe`) and
legs (`serve`) tell it what happened, policies read what it lends.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from kvrouter.engines.engine import Breaker, BreakerState, Engine, HashDomain, Identity, Role
from kvrouter.http.failure import Failure
from kvrouter.options.addresses import SECURE, bare_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Ticket:
    """One leg's place on an engine, from `EnginePool.reserve`; its owner must release it.

    Its tokens count from the reservation on, the leg itself from `begin` on. Release is idempotent,
    so that it may stand in a `finally` beside an earlier release.

    Attributes:
        engine: where it counts.
        tokens: how many.
        computing_tokens: prompt tokens that a decode leg has to compute there, until it has.
        begun: whether the leg has been sent, or is about to be.
    """

    __slots__ = ("_pool", "begun", "computing_tokens", "engine", "tokens")

    def __init__(
        self, pool: EnginePool, engine: Engine, tokens: int, computing_tokens: int
    ) -> None:
        self._pool: EnginePool | None = pool
        self.engine = engine
        self.tokens = tokens
        self.computing_tokens = computing_tokens
        self.begun = False

    def begin(self) -> None:
        """The leg is sent now: count it as under way. Idempotent; a released ticket stays so."""
        if self._pool is not None and not self.begun:
            self.begun = True
            self._pool._began(self.engine)

    def computed(self) -> None:
        """The prompt is computed: it holds nobody up any more. Idempotent."""
        self.engine.computing_tokens -= self.computing_tokens
        self.computing_tokens = 0

    def release(self) -> None:
        """Give the place back; later calls do nothing."""
        self.computed()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._released(self)


class EnginePool:
    """Engines by address, with their health, breakers and load.

    Args:
        clock: seconds, monotonic; injected by tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines: dict[str, Engine] = {}
        self._ready: dict[tuple[str, str | None], tuple[Engine, ...]] = {}
        self._unsettled: set[Engine] = set()
        self._domain: HashDomain | None = None
        self._when_joined: list[Callable[[Engine], None]] = []
        self._when_left: list[Callable[[Engine], None]] = []
        self._when_removed: list[Callable[[Engine], None]] = []
        self._when_models_change: list[Callable[[Engine], None]] = []

    def add(self, address: str, role: Role, family: str = "store") -> Engine:
        """Name an engine to be probed; it may be asked only after `join`.

        The same address named under the other role becomes an engine for both legs.
        """
        name = bare_address(address)
        engine = self._engines.get(name)
        if engine is None:
            engine = Engine(name, role, family, breaker=Breaker(self._clock), tls=name != address)
            self._engines[name] = engine
        elif engine.role is not role:
            engine.role = Role.BOTH
            self._ready.clear()
        return engine

    def assign(self, address: str, role: Role) -> Engine:
        """The engine of that address with exactly that role; made where there is none.

        One that was draining stays. Legs under way go on, but for one that is to be reached by
        HTTPS from now on, or no longer: that is another engine.
        """
        known = self.find(address)
        if known is not None and known.url != f"{'' if SECURE in address else 'http://'}{address}":
            self.remove(known)
        engine = self.add(address, role)
        for each in (engine, *engine.ranks):
            each.role = role
        engine.draining = False
        self._changed()
        return engine

    def drain(self, engine: Engine) -> bool:
        """Give `engine` no new legs; it is removed when those under way have ended.

        Returns:
            whether it is removed already.
        """
        engine.draining = True
        self._changed()
        if not engine.requests:
            self._remove(engine)
        return not engine.requests

    def remove(self, engine: Engine) -> None:
        """Remove `engine` now, whatever is under way on it. Tickets stay valid."""
        engine.draining = True
        self._changed()
        self._remove(engine)

    def on_join(self, callback: Callable[[Engine], None]) -> None:
        """Call `callback` with each engine that may be asked from now on; its identity is known."""
        self._when_joined.append(callback)

    def on_leave(self, callback: Callable[[Engine], None]) -> None:
        """Call `callback` with each engine that is gone: what it held is lost."""
        self._when_left.append(callback)

    def on_remove(self, callback: Callable[[Engine], None]) -> None:
        """Call `callback` with each engine that is removed for good, after it has left."""
        self._when_removed.append(callback)

    def on_models_change(self, callback: Callable[[Engine], None]) -> None:
        """Call `callback` with each engine in the pool that serves other models from now on."""
        self._when_models_change.append(callback)

    def named(self, role: Role) -> bool:
        """Whether there is any engine for the leg `role`, be it away or not."""
        return any(e.role.serves(role) and not e.draining for e in self._engines.values())

    def all(self) -> tuple[Engine, ...]:
        """Every engine that was named, joined or not; of one with several ranks the server."""
        return tuple(self._engines.values())

    def targets(self) -> Iterator[Engine]:
        """What legs are sent to: every engine that was named, or its ranks."""
        for engine in self._engines.values():
            yield from engine.targets

    def find(self, address: str) -> Engine | None:
        """The engine of that `HOST:PORT`, however it is reached, if it was named."""
        return self._engines.get(bare_address(address))

    def target(self, address: str) -> Engine | None:
        """What legs are sent to by the name `HOST:PORT` or `HOST:PORT@RANK`, if there is such."""
        server = self._engines.get(address.partition("@")[0])
        targets = server.targets if server is not None else ()
        return next((target for target in targets if target.address == address), None)

    def join(self, engine: Engine, identity: Identity) -> bool:
        """`engine` answered its probes and is `identity`; returns whether it was away before.

        An engine that is in the pool under another identity leaves first: it was restarted, and
        what it held is gone.
        """
        if engine.identity == identity:
            return False
        if engine.identity is not None:
            self.leave(engine)
        engine.divide(identity.ranks)
        for each in (engine, *engine.ranks):
            each.identity = identity
            each.joins += 1
            each.family = identity.family or each.family
            each.role = engine.role
            each.breaker = Breaker(self._clock)
            self._unsettled.discard(each)
        self._changed()
        for target in engine.targets:
            for callback in self._when_joined:
                callback(target)
        return True

    def update_models(self, engine: Engine, identity: Identity) -> None:
        """`engine`, which is in the pool, serves other models or adapters now.

        Nothing else of `identity` differs from what it was: the engine keeps its breaker, its load
        and what is known of its cache.
        """
        for each in (engine, *engine.ranks):
            each.identity = identity
        self._ready.clear()
        for target in engine.targets:
            for callback in self._when_models_change:
                callback(target)

    def leave(self, engine: Engine) -> bool:
        """The server of `engine` is gone; returns whether it was here. Tickets stay valid."""
        server = engine.server
        if server.identity is None:
            return False
        for each in (server, *server.ranks):
            each.identity = None
            self._unsettled.discard(each)
        self._changed()
        for target in server.targets:
            for callback in self._when_left:
                callback(target)
        return True

    def engines(self, role: Role, model: str | None = None) -> Sequence[Engine]:
        """Engines that may be given the leg `role` now, for `model` (None: any model)."""
        ready = self._ready.get((role, model))  # almost always there: it is asked thrice a request
        if ready is not None and not self._unsettled:
            return ready
        return self._find(role, role, model, lambda identity: identity.generates)

    def serving(self, path: str, model: str | None = None) -> Sequence[Engine]:
        """Decode engines that may be asked `path` of `model` now, whole; see `Identity.serves`."""
        return self._find(path, Role.DECODE, model, lambda identity: identity.serves(path))

    def _find(
        self, key: str, role: Role, model: str | None, able: Callable[[Identity], bool]
    ) -> Sequence[Engine]:
        """Engines of `role` that are there and able; `key` and `model` name the question."""
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

    @property
    def domain(self) -> HashDomain | None:
        """The hash domain that most joined engines are in, decode engines before others.

        None while no engine tells one.
        """
        return self._domain

    def models(self) -> tuple[str, ...]:
        """Names of all models that a joined engine serves, each once, in order of joining."""
        names = (m for e in self._engines.values() if e.identity for m in e.identity.models)
        return tuple(dict.fromkeys(names))

    def reserve(
        self, engine: Engine, tokens: int, *, begun: bool = True, computing_tokens: int = 0
    ) -> Ticket:
        """Count `tokens` on `engine` until the ticket is released, and a leg under way.

        Args:
            engine: where.
            tokens: how many.
            begun: False where the leg is planned only: it is under way from `Ticket.begin` on.
            computing_tokens: those of the prompt that a decode leg will compute itself.
        """
        engine.tokens += tokens
        engine.computing_tokens += computing_tokens
        if engine.server is not engine:
            engine.server.tokens += tokens
        ticket = Ticket(self, engine, tokens, computing_tokens)
        if begun:
            ticket.begin()
        return ticket

    def set_remote_tokens(self, engine: Engine, tokens: int) -> None:
        """Others have `tokens` under way on `engine`, all in all: policies count them too."""
        engine.tokens += tokens - engine.remote_tokens
        engine.remote_tokens = tokens

    def succeeded(self, engine: Engine) -> None:
        """A leg on `engine` was answered well."""
        if engine in self._unsettled:
            self._unsettled.discard(engine)
            if engine.breaker is not None:
                engine.breaker.succeeded()

    def failed(self, engine: Engine, reason: Failure) -> bool:
        """A leg on `engine` failed for `reason`; returns whether it may no longer be asked.

        REFUSED means that its process is gone: it leaves at once, and joins again by its probe.
        Anything else counts in its breaker.
        """
        if reason is Failure.REFUSED:
            return self.leave(engine)
        if engine.identity is None or engine.breaker is None:
            return False
        self._unsettled.add(engine)
        return engine.breaker.failed()

    def state(self, engine: Engine) -> BreakerState | None:
        """Its breaker's state, or None while it is not in the pool."""
        if engine.identity is None or engine.breaker is None:
            return None
        return engine.breaker.state

    def _changed(self) -> None:
        self._ready.clear()
        told: dict[bool, Counter[HashDomain]] = {True: Counter(), False: Counter()}
        for engine in self._engines.values():
            identity = engine.identity
            if identity is not None and identity.domain is not None and not engine.draining:
                told[engine.role.serves(Role.DECODE)][identity.domain] += 1
        votes = told[True] or told[False]
        self._domain = votes.most_common(1)[0][0] if votes else None

    def _began(self, engine: Engine) -> None:
        engine.requests += 1
        if engine.server is not engine:
            engine.server.requests += 1
        if engine in self._unsettled and engine.breaker is not None:
            engine.breaker.began()

    def _released(self, ticket: Ticket) -> None:
        engine, server = ticket.engine, ticket.engine.server
        engine.tokens -= ticket.tokens
        if server is not engine:
            server.tokens -= ticket.tokens
        if not ticket.begun:
            return
        engine.requests -= 1
        if server is not engine:
            server.requests -= 1
        if server.draining and not server.requests:
            self._remove(server)
        if engine in self._unsettled and engine.breaker is not None:
            engine.breaker.ended()

    def _remove(self, engine: Engine) -> None:
        if self._engines.get(engine.address) is not engine:
            return
        self.leave(engine)
        del self._engines[engine.address]
        for callback in self._when_removed:
            callback(engine)
