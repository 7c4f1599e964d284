"""`--kv-connector auto`: what each engine is found to be, and what the router says of it."""

import logging

import pytest
from tests.contract.families.conftest import MODEL_BODY, Open
from tests.fakes.pd import Json, Network, PdEngine, PlainEngine
from tests.fakes.pd_mooncake import MooncakeEngine
from tests.fakes.pd_nixl import NixlEngine
from tests.fakes.pd_sglang import SglangEngine

from kvrouter.app.build import build
from kvrouter.app.settings import RouterSettings
from kvrouter.engines.engine import Engine
from kvrouter.tools.sim.requests import GenerateRequest


async def detected(*engines: PdEngine, **settings: object) -> list[Engine]:
    """What the router knows of these engines once it has started."""
    for engine in engines:
        await engine.start()
    named = {
        role: [e.address for e in engines if e.role in (role, "both")]
        for role in ("prefill", "decode")
    }
    named["decode"] = named["decode"] or named["prefill"]
    app = build(RouterSettings(port=0, **named, **settings))  # type: ignore[arg-type]
    try:
        await app.start()
        known = {engine.address: engine for engine in app.core.pool.all()}
        return [known[engine.address] for engine in engines]
    finally:
        await app.close()
        for engine in engines:
            await engine.stop()


@pytest.mark.parametrize(
    ("kind", "family"),
    [(PdEngine, "store"), (NixlEngine, "nixl"), (SglangEngine, "sglang"), (PlainEngine, "openai")],
)
async def test_engines_are_found_to_be_what_they_are(kind: type[PdEngine], family: str) -> None:
    network = Network()
    found = await detected(kind(network, "prefill"), kind(network, "decode"))
    assert [engine.family for engine in found] == [family, family]
    assert all(engine.identity is not None for engine in found)


async def test_sglangs_bootstrap_port_is_learnt() -> None:
    network = Network()
    prefill = SglangEngine(network, "prefill")
    found, _ = await detected(prefill, SglangEngine(network, "decode"))
    assert found.identity is not None
    assert found.identity.bootstrap is not None
    assert found.identity.bootstrap.port == prefill.bootstrap_port


async def test_a_bootstrap_port_that_is_given_is_taken() -> None:
    network = Network()
    prefill = SglangEngine(network, "prefill")
    found, _ = await detected(prefill, SglangEngine(network, "decode"), bootstrap_port=["9"])
    assert found.identity is not None
    assert found.identity.bootstrap is not None
    assert found.identity.bootstrap.port == 9


async def test_an_engine_named_for_the_other_leg_does_not_join(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = Network()
    wrong = SglangEngine(network, "decode")
    with caplog.at_level(logging.WARNING):
        await wrong.start()
        app = build(RouterSettings(port=0, prefill=[wrong.address], decode=["127.0.0.1:1"]))
        await app.start()
        await app.close()
        await wrong.stop()
    assert "name it under --decode alone" in caplog.text


async def test_vllm_with_an_unknown_connector_is_logged_as_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = Network()
    with caplog.at_level(logging.WARNING):
        (found,) = await detected(MooncakeEngine(network, "decode"))
    assert found.family == "store"
    assert "give --kv-connector mooncake" in caplog.text


class TwoConnectors(NixlEngine):
    """vLLM's MultiConnector with NixlConnector and kvrouter's: their parameters in one object.

    vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py, `_aggregate_request_finished`.
    """

    def finish(self, body: Json, request: GenerateRequest, kv: bytes) -> Json | None:
        told = {"manifest": "ab" * 32, "blocks": 0, "block_tokens": 16}
        return {**(super().finish(body, request, kv) or {}), "kvstore": told}


async def test_vllm_with_two_connectors_hands_over_by_nixl_unless_told_otherwise() -> None:
    network = Network()
    (found,) = await detected(TwoConnectors(network, "decode"))
    assert (found.family, found.manifest) == ("nixl", "ab" * 32)
    (found,) = await detected(TwoConnectors(network, "decode"), kv_connector="store")
    assert (found.family, found.manifest) == ("store", "ab" * 32)


async def test_mooncake_without_its_bootstrap_server_does_not_join(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = Network()
    with caplog.at_level(logging.WARNING):
        found, _ = await detected(
            MooncakeEngine(network, "prefill"),
            MooncakeEngine(network, "decode"),
            kv_connector="mooncake",
            bootstrap_port=["1"],
        )
    assert found.identity is None
    assert "MooncakeConnector's bootstrap server" in caplog.text


async def test_engines_of_two_families_do_not_pair(caplog: pytest.LogCaptureFixture) -> None:
    network = Network()
    with caplog.at_level(logging.WARNING):
        await detected(SglangEngine(network, "prefill"), NixlEngine(network, "decode"))
    assert "the families differ: sglang and nixl" in caplog.text


async def test_a_plain_server_named_for_prefill_gets_no_leg(open_site: Open) -> None:
    here = await open_site("openai")
    await here.same(MODEL_BODY)
    assert here.prefill[0].requests == []
    assert await here.metric('kvrouter:plans_total{why="shares no KV"}') == 1
