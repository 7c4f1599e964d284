"""The two groups of engines: those asked alone, and pairs of prefill and decode behind a router."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from tests.vllm.engines import Engine, EngineFailed, transfer_config
from tests.vllm.nixl import until_met
from tests.vllm.services import Service, start_router, start_store

from benchmarks.connectors.judge import FLOOR, NONE, OURS
from benchmarks.connectors.measure import Plan, Record, cold, compute, hits
from benchmarks.connectors.peers import LMCACHE, MOONCAKE, NIXL, PEERS, Joined, Missing
from benchmarks.connectors.rig import IDLE_S, Rig, Setup, tame_spinners
from benchmarks.wire_rig import share_of_core

STORE_MEMORY = "2GiB"
BUSY_SHARE = 0.2  # of a core, of an idle engine: its set-up spins


def alone(rig: Rig, plan: Plan, record: Record) -> None:
    """Hits, then prompts without hits. All engines run on the same core, one at a time."""
    store = start_store(rig.folder, STORE_MEMORY)
    rig.stack.callback(store.stop)
    started = {
        FLOOR: [rig.engine("alone", "0", Joined())],
        OURS: [rig.engine("ours", "0", Joined(transfer_config(store.url)))],
    }
    for name in (LMCACHE, MOONCAKE):
        _start_peer(rig, name, {name: "0"}, started, record)
    ready = _ready(started, store, record)
    setups = _each(ready.values(), lambda setup: _computed(plan, setup), record)
    hits(plan, setups, record)
    floor = Setup(NONE, ready[FLOOR].engines)
    cold("no hit", plan, [floor, ready[OURS]], record, lambda name: 0)


def handed_over(rig: Rig, plan: Plan, record: Record) -> None:
    """Cold prompts through a router, each before a prefill and a decode engine of its own."""
    store = start_store(rig.folder, STORE_MEMORY)
    rig.stack.callback(store.stop)
    started = {
        OURS: [
            rig.engine("prefill", "0", Joined(transfer_config(store.url, "kv_producer"))),
            rig.engine("decode", "1", Joined(transfer_config(store.url, "kv_consumer"))),
        ]
    }
    _start_peer(rig, NIXL, {"nixl-prefill": "0", "nixl-decode": "1"}, started, record)
    ready = _ready(started, store, record)
    setups = _each(ready.values(), lambda setup: _routed(rig, setup), record)
    cold("cold P/D", plan, setups, record, lambda name: plan.reused_tokens)


def _start_peer(
    rig: Rig, name: str, cores: dict[str, str], started: dict[str, list[Engine]], record: Record
) -> None:
    """Start a peer's engines, given as name and core; a role for each if there are two."""
    roles = ("kv_producer", "kv_consumer") if len(cores) > 1 else ("kv_both",)
    try:
        engines = []
        for (engine, core), role in zip(cores.items(), roles, strict=True):
            joined = PEERS[name](rig.python, rig.folder, rig.stack)
            joined = replace(joined, transfer={**joined.transfer, "kv_role": role})
            engines.append(rig.engine(engine, core, joined))
        started[name] = engines
    except (Missing, EngineFailed) as error:
        record.skip(name, error)


def _ready(started: dict[str, list[Engine]], store: Service, record: Record) -> dict[str, Setup]:
    """Set-ups whose engines all answer; those that spin are stopped."""
    found = [
        Setup(name, tuple(engines), store=store if name == OURS else None)
        for name, engines in started.items()
    ]
    answering = _each(found, _answering, record)
    return {setup.name: _watched(setup, record) for setup in answering}


def _each(
    setups: Iterable[Setup], prepare: Callable[[Setup], Setup], record: Record
) -> list[Setup]:
    """What `prepare` makes of the set-ups. A peer that fails is skipped with its reason."""
    found = []
    for setup in setups:
        try:
            found.append(prepare(setup))
        except (EngineFailed, OSError) as error:
            if setup.name not in PEERS:
                raise
            record.skip(setup.name, error)
    return found


def _answering(setup: Setup) -> Setup:
    for engine in setup.engines:
        engine.wait_ready()
    return setup


def _computed(plan: Plan, setup: Setup) -> Setup:
    compute(plan, setup)
    print(f"{setup.name} keeps {plan.prompts} prompts", flush=True)
    return setup


def _watched(setup: Setup, record: Record) -> Setup:
    """The set-up, whose engines are stopped while they are not asked if they spin when idle."""
    shares = {e.options.name: share_of_core([e.process.pid], IDLE_S) for e in setup.engines}
    record.idle_share |= shares
    print("idle, of a core:", *(f"{n} {share:.2f}" for n, share in shares.items()), flush=True)
    watched = replace(setup, spins=max(shares.values()) > BUSY_SHARE)
    if watched.spins:
        spinning = tame_spinners(setup.engines)
        print(f"{setup.name}: {spinning} threads spin, now with low priority", flush=True)
    watched.pause()
    return watched


def _routed(rig: Rig, setup: Setup) -> Setup:
    """The set-up behind a router of its own, once that has answered."""
    prefill, decode = setup.engines
    setup.resume()
    rig.stack.callback(setup.resume)  # or they would not end when asked
    # One patient health check at the start: engines that are stopped do not answer others.
    flags = ["--prefill-threshold", "0", "--health-interval", "3600", "--health-timeout", "50"]
    store_url = setup.store.url if setup.store else None
    router = start_router(rig.folder, [prefill.url], [decode.url], store_url, flags)
    rig.stack.callback(router.stop)
    until_met(router)
    setup.pause()
    return replace(setup, router=router)
