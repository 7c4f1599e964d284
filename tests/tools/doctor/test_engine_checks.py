"""Checks of engines by facts that a simulated engine does not have."""

from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.families import Families
from kvrouter.membership.probe_client import ProbeClient, ProbeResponse
from kvrouter.tools.doctor.base import Finding, Host, Setup
from kvrouter.tools.doctor.engines import (
    EngineFacts,
    lead_s,
    odd_ones,
    read_blocks_without_room,
    read_cache_config,
)
from kvrouter.tools.doctor.registry import CHECKS
from kvrouter.tools.doctor.run import DoctorSettings
from kvrouter.tools.doctor.trials import pairs_to_try

FAILURES = "vllm:kv_offload_tiering_promotion_allocation_failures_total"
PAGE = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="False"} 1.0
"""


def engine(address: str, role: Role, family: str = "store", **facts: Any) -> EngineFacts:
    """An engine that said so much of itself; `cache_config` is of its metrics."""
    config = facts.pop("cache_config", {})
    made = Engine(address, role, family, Identity(("m",), family=family, **facts))
    return EngineFacts(made, cache_config=config)


async def found(check: str, *engines: EngineFacts, **settings: Any) -> list[Finding]:
    """What one check says of these engines."""
    router = DoctorSettings(**settings)
    setup = Setup(router, Host(Path("/nowhere")), Families(), ProbeClient(), 1)
    setup.engines = list(engines)
    (examine,) = (each.examine for each in CHECKS if each.name == check)
    return [found async for found in examine(setup)]


async def test_engines_that_hand_kv_over_in_different_ways_are_reported() -> None:
    one, other = engine("a:1", Role.PREFILL, "nixl"), engine("b:1", Role.DECODE)
    (finding,) = await found("family", one, other)
    assert finding.subject == "prefill engine a:1"
    assert "as nixl, other engines of m as store" in finding.finding
    assert not await found("family", engine("a:1", Role.PREFILL), other)


async def test_engines_that_do_not_wait_are_reported_if_they_should() -> None:
    decode = engine("b:1", Role.DECODE, manifest="ab" * 32)
    settings = {"decode_dispatch": "chunk", "store": "kv://127.0.0.1:1"}
    (finding,) = await found("connector-waits", decode, **settings)
    assert "--decode-dispatch chunk is given" in finding.finding
    waits = engine("b:1", Role.DECODE, manifest="ab" * 32, waits=True)
    assert not await found("connector-waits", waits, **settings)
    assert not await found("connector-waits", decode, store="kv://127.0.0.1:1")


async def test_engines_that_do_not_name_one_of_several_nodes_are_reported() -> None:
    nodes = ["kv://a:7400", "kv://b:7400"]
    told = {"manifest": "ab" * 32}
    right = engine("a:1", Role.PREFILL, node="kv://a:7400", **told)
    silent = engine("b:1", Role.DECODE, **told)
    local = engine("c:1", Role.DECODE, node="kv://127.0.0.1:7400", **told)
    other = engine("d:1", Role.DECODE)
    first, second = await found("store-node", right, silent, local, other, store=nodes)
    assert (first.subject, "names none" in first.finding) == ("decode engine b:1", True)
    assert "it names the store node kv://127.0.0.1:7400" in second.finding
    assert not await found("store-node", silent, local, store=nodes[:1])


async def test_a_connector_that_refuses_is_reported_with_its_reason() -> None:
    decode = engine("b:1", Role.DECODE, refusal="sliding windows have no whole blocks")
    (finding,) = await found("connector", decode)
    assert "sliding windows" in finding.finding


async def test_an_alias_of_a_model_that_nobody_decodes_is_reported() -> None:
    engines = engine("a:1", Role.PREFILL), engine("b:1", Role.DECODE)
    (finding,) = await found("aliases", *engines, model_alias=["chat=m:9,n:1", "x=m"])
    assert finding.subject == "alias chat"
    assert "it stands for n, which no decode engine serves (they serve m)" in finding.finding
    assert not await found("aliases", *engines, model_alias=["chat=m"])


def test_each_engine_is_tried_with_one_of_its_own_model() -> None:
    setup = Setup(DoctorSettings(), Host(Path("/nowhere")), Families(), ProbeClient(), 1)

    def known(address: str, role: Role, model: str, block_tokens: int = 16) -> EngineFacts:
        identity = Identity((model,), None, block_tokens, manifest=model * 64)
        return EngineFacts(Engine(address, role, identity=identity))

    def tried(*engines: EngineFacts) -> list[tuple[str, str]]:
        pairs = pairs_to_try(setup, list(engines))
        return [(one.engine.address, other.engine.address) for one, other in pairs]

    prefill = [known("a:1", Role.PREFILL, "a"), known("b:1", Role.PREFILL, "b", 64)]
    decode = [known("b:2", Role.DECODE, "b", 64), known("a:2", Role.DECODE, "a")]
    expected = [("a:1", "a:2"), ("b:1", "b:2")]
    assert tried(*prefill, *decode) == expected
    assert tried(*prefill, *decode, known("b:3", Role.DECODE, "b", 64)) == [
        *expected,
        ("b:1", "b:3"),
    ]
    both = [known(f"c:{port}", Role.BOTH, "c") for port in (1, 2)]
    assert tried(*both) == [("c:1", "c:2"), ("c:2", "c:1")]
    assert tried(both[0], prefill[0]) == []


async def test_cache_settings_from_metrics_are_compared() -> None:
    config = read_cache_config(PAGE)
    assert config == {"block_size": "16", "cache_dtype": "auto", "enable_prefix_caching": "False"}
    one = engine("a:1", Role.PREFILL, cache_config=config)
    other = engine("b:1", Role.DECODE, cache_config={**config, "cache_dtype": "fp8"})
    (caching, _) = await found("prefix-caching", one, other)
    assert caching.remedy == "start it with --enable-prefix-caching"
    (dtype,) = await found("kv-dtype", one, other)
    assert "auto there and fp8 elsewhere" in dtype.finding
    assert not await found("kv-dtype", one, one)


async def test_an_engine_that_computed_hits_for_want_of_host_memory_is_found() -> None:
    page = "".join(
        f'{FAILURES}{{engine="{number}",model_name="m"}} {blocks}\n'
        for number, blocks in enumerate(("16.0", "1.024e+03"))
    )
    assert read_blocks_without_room(page) == 1040
    assert read_blocks_without_room(PAGE) == 0
    one, other = engine("a:1", Role.DECODE), engine("b:1", Role.DECODE)
    one.blocks_without_room = 1040
    (finding,) = await found("host-memory", one, other)
    assert "it computed 1040 blocks that the store had" in finding.finding
    assert '"cpu_bytes_to_use"' in finding.remedy


async def test_hash_algorithms_from_metrics_are_compared() -> None:
    one = engine("a:1", Role.PREFILL, cache_config={"prefix_caching_hash_algo": "sha256"})
    other = engine("b:1", Role.DECODE, cache_config={"prefix_caching_hash_algo": "sha256_cbor"})
    (finding,) = await found("block-hashes", one, other)
    assert "by sha256 there and sha256_cbor elsewhere" in finding.finding


async def test_a_full_dev_shm_matters_where_engines_run() -> None:
    class Full(Host):
        def shm_free_bytes(self) -> int | None:
            return 1 << 20

    (examine,) = (each.examine for each in CHECKS if each.name == "shared-memory")
    for address, findings in (("127.0.0.1:1", 1), ("10.0.0.1:1", 0)):
        facts = engine(address, Role.DECODE)
        setup = Setup(DoctorSettings(), Full(), Families(), ProbeClient(), 1, engines=[facts])
        assert len([found async for found in examine(setup)]) == findings, address


@pytest.mark.parametrize(
    ("since_s", "until_s", "ahead_s"),
    [(999.2, 1000.9, 0.0), (990.0, 1003.0, 0.0), (1010.0, 1012.0, -9.0), (980.0, 985.0, 15.0)],
)
def test_a_clock_is_wrong_only_where_no_moment_of_the_answer_explains_its_date(
    since_s: float, until_s: float, ahead_s: float
) -> None:
    """A `Date` is cut to whole seconds, and an answer may take long."""
    answer = ProbeResponse(b"", {"date": formatdate(1000, usegmt=True)})
    assert lead_s(answer, since_s, until_s) == ahead_s


def test_the_odd_ones_are_those_that_differ_from_the_most() -> None:
    assert odd_ones({"a": 1, "b": 1, "c": 2}) == (["c"], 2, 1)
    assert odd_ones({"a": 1, "b": 2}) == (["a"], 1, 2), "those named last are in the right"
    assert odd_ones({"a": 1, "b": 1}) is None
    assert odd_ones({}) is None


@pytest.mark.parametrize("check", ["connector", "models", "engine-version", "prefix-caching"])
async def test_an_engine_that_only_embeds_is_not_held_to_what_engines_share(check: str) -> None:
    given: dict[str, Any] = {"manifest": "ab" * 32, "version": "0.32.0"}
    generating = [engine("a:1", Role.PREFILL, **given), engine("b:1", Role.DECODE, **given)]
    identity = Identity(("e",), family="store", can_split=False, generates=False, version="0.31.0")
    config = {"enable_prefix_caching": "False", "cache_dtype": "fp8"}
    embeds = EngineFacts(Engine("c:1", Role.DECODE, identity=identity), cache_config=config)
    assert not await found(check, *generating, embeds, store="kv://127.0.0.1:1")


async def test_ports_of_kv_events_that_are_closed_or_refused_are_reported() -> None:
    closed = engine("127.0.0.1:2", Role.PREFILL, event_ports={0: (1, 0)})
    (finding,) = await found("kv-event-ports", closed)
    assert "port 1: Connection refused" in finding.finding
    refused = engine("127.0.0.1:2", Role.DECODE, events_refused="'ipc:///a' is no tcp://HOST:PORT")
    (finding,) = await found("kv-event-ports", refused)
    assert "ipc:///a" in finding.finding
    assert not await found("kv-event-ports", engine("127.0.0.1:2", Role.DECODE))
