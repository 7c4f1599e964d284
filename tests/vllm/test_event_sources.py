"""What vLLM says of its KV events, and those of draft layers, by its own code."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from tests.unit.router.conftest import joined
from tests.unit.router.prefix.events.test_tracker import make_wire
from tests.vllm.run_inside import run_inside
from tests.vllm.test_walks import next_vllm

from kvrouter.engines.engine import Role
from kvrouter.membership.detect import read_event_sources
from kvrouter.prefix.events.confidence import Reason
from kvrouter.prefix.events.mapping import Naming
from kvrouter.tools.sim.events import EventPublisher
from kvrouter_store.identity.chain import hash_tokens, root_hash

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.tested("next vllm", "where KV events are published", "code"),
    pytest.mark.tested("next vllm", "block names of draft layers", "code"),
]
__all__ = ["next_vllm"]

STEPS = 400


@pytest.fixture(scope="module")
def told(vllm_python: Path, next_vllm: Path) -> dict[str, Any]:
    done = run_inside(vllm_python, (next_vllm,), "event_sources.py", 1, STEPS)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def test_the_router_reads_where_vllm_says_that_it_publishes(told: dict[str, Any]) -> None:
    ports, refused = await read_event_sources("127.0.0.1", told["two"])
    assert refused is None
    assert {
        str(rank): (f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replays}")
        for rank, (events, replays) in ports.items()
    } == {
        rank: (source["endpoint"], source["replay_endpoint"])
        for rank, source in told["two"].items()
    }
    assert await read_event_sources("127.0.0.1", told["none"]) == ({}, None)
    assert (await read_event_sources("127.0.0.1", told["inproc"]))[1] is not None


async def test_a_simulated_engine_says_what_vllm_does(told: dict[str, Any]) -> None:
    publisher = EventPublisher("tcp://127.0.0.1:*", "kv", 16, "tcp://127.0.0.1:*")
    try:
        assert publisher.source.keys() == told["two"]["0"].keys()
        kinds = {name: type(value) for name, value in told["two"]["0"].items()}
        assert {name: type(value) for name, value in publisher.source.items()} == kinds
    finally:
        publisher.close()


def test_blocks_of_an_engine_that_looks_ahead_are_known_but_for_the_last_one(
    told: dict[str, Any],
) -> None:
    wire, walk = make_wire(), told["walk"]
    engine = joined(wire.pool, "e:2", Role.DECODE, models=("draft",), block_tokens=walk["block"])
    chains = [
        hash_tokens(array("I", each), walk["block"], root=root_hash(None)).data
        for each in walk["prompts"]
    ]
    more = 0
    for number, step in enumerate(walk["steps"]):
        frames = [b"", number.to_bytes(8, "big"), bytes.fromhex(step["message"])]
        wire.tracker.receive_from(engine, frames)
        for chain, hits in zip(chains, step["hits"], strict=True):
            known = wire.index.match(chain).get(engine, 0)
            assert hits <= known <= hits + 1, f"step {number}"
            more += known > hits
    assert more, "no prompt went on in another way behind a block"
    wire.tracker.tick()
    assert wire.tracker.naming(engine) is Naming.MAPPED
    assert wire.tracker.confidence(engine) is Reason.LOOKAHEAD
