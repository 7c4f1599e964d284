"""MooncakeConnector before vLLM 0.14: the id of a request is what its legs find each other by."""

import asyncio
import logging

import pytest
from tests.contract.families.conftest import KINDS, Open, chat, ids
from tests.contract.families.test_detection import detected
from tests.fakes.patience import until
from tests.fakes.pd import Network, PdEngine
from tests.fakes.pd_mooncake_legacy import MooncakeLegacyEngine


def legacy(engines: list[PdEngine]) -> list[MooncakeLegacyEngine]:
    assert all(isinstance(engine, MooncakeLegacyEngine) for engine in engines)
    return engines  # type: ignore[return-value]


async def test_clients_that_say_the_same_id_get_each_their_own_answer(open_site: Open) -> None:
    here = await open_site("mooncake-legacy", 1, 2)
    header = {"x-request-id": "mine"}
    prompts = range(300, 308)
    answers = await asyncio.gather(*(here.post(ids(at), headers=header) for at in prompts))
    assert [status for status, _ in answers] == [200] * 8
    sent = [headers["x-request-id"] for headers in here.prefill[0].headers]
    assert len(set(sent)) == 8
    assert all(name.startswith("mine-") for name in sent)
    received = [headers["x-request-id"] for engine in here.decode for headers in engine.headers]
    assert sorted(received) == sorted(sent)


async def test_chats_and_streams_hand_over_by_the_same_id_too(open_site: Open) -> None:
    here = await open_site("mooncake-legacy")
    await here.same(chat(stream=True), "/v1/chat/completions")
    await here.same(chat(), "/v1/chat/completions")
    await here.same(ids(stream=True))
    assert legacy(here.decode)[0].fetched == 3


async def test_kv_that_a_failed_engine_may_have_fetched_is_handed_over_again_with_another_id(
    open_site: Open,
) -> None:
    here = await open_site("mooncake-legacy", 1, 2)
    here.decode[0].mode = here.decode[1].mode = "drop_mid"
    status, _ = await here.post(ids(), headers={"x-request-id": "mine"})
    assert status == 503
    sent = [headers["x-request-id"] for headers in here.prefill[0].headers]
    assert len(sent) == len(set(sent)) > 1


async def test_an_engine_that_was_never_reached_leaves_the_hand_over_and_its_id_to_another(
    open_site: Open,
) -> None:
    here = await open_site("mooncake-legacy", 1, 2)
    await here.decode[0].stop()
    for first in range(4):
        await here.same(ids(300 + first))
    assert len(here.prefill[0].requests) == legacy(here.decode)[1].fetched == 4


async def test_kv_without_a_decode_engine_is_counted_and_stays_for_its_lease(
    open_site: Open,
) -> None:
    here = await open_site("mooncake-legacy")
    here.prefill[0].mode = "held"
    task = asyncio.create_task(here.post(ids()))
    await here.prefill[0].next_began()
    await here.decode[0].stop()
    here.prefill[0].go.set()
    assert (await task)[0] == 503
    assert await here.metric('kvrouter:stranded_release_total{outcome="stranded"}') == 1
    await until(lambda: not here.prefill[0].held)


@pytest.mark.parametrize("version", ["0.14.1", "0.15.0rc1"])
@pytest.mark.parametrize("said", ["mooncake", "mooncake-legacy"])
async def test_versions_that_name_the_legs_apart_do_not_join(
    caplog: pytest.LogCaptureFixture, version: str, said: str
) -> None:
    engine = MooncakeLegacyEngine(Network(), "decode")
    engine.version = version
    with caplog.at_level(logging.WARNING):
        (found,) = await detected(engine, kv_connector=said)
    assert found.identity is None
    assert f"vLLM {version} gives the legs of one request different ids" in caplog.text
    assert "use vLLM 0.13, or 0.16 and later" in caplog.text


@pytest.mark.parametrize(
    ("version", "said", "family"),
    [
        ("0.10.2", "mooncake", "mooncake-legacy"),
        ("0.13.0+cpu", "mooncake", "mooncake-legacy"),
        ("0.16.0", "mooncake", "mooncake"),
        ("0.32.0", "mooncake-legacy", "mooncake"),
        ("0.1.dev1+g57580594", "mooncake", "mooncake"),
        ("0.1.dev1+g57580594", "mooncake-legacy", "mooncake-legacy"),
        ("unknown", "mooncake-legacy", "mooncake-legacy"),
    ],
)
async def test_the_version_decides_the_family_else_the_flag(
    version: str, said: str, family: str
) -> None:
    engine = KINDS[family](Network(), "decode")
    engine.version = version
    (found,) = await detected(engine, kv_connector=said)
    assert found.identity is not None
    assert found.family == family


async def test_a_fake_knows_an_id_that_another_version_has_changed(open_site: Open) -> None:
    """The rule for which such versions are refused: without it answers are wrong."""
    here = await open_site("mooncake-legacy")
    engines = legacy(here.engines)
    for engine in engines:
        engine.version = "0.15.0"
    status, _ = await here.post(ids())
    assert status == 200
    assert "not found in reqs_need_send" in engines[1].violations.pop()


async def test_a_fake_knows_an_id_that_is_used_twice() -> None:
    engine = MooncakeLegacyEngine(Network(), "prefill")
    body = ids(kv_transfer_params={"do_remote_decode": True})
    engine._id_of[id(body)], engine._rank_of[id(body)] = "mine", 0
    for _ in range(2):
        engine.finish(body, type("Request", (), {"prompt": [1]})(), b"")
    assert engine.violations == ["cmpl-mine-0 names two hand-overs: one gets the other's KV"]
    for kept in engine.kept.values():
        kept.expiry.cancel()
