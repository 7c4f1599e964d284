"""Engines behind HTTPS: all that the router asks them goes through it, or does not go at all."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.fakes.certificates import Authority, Signed
from tests.fakes.engine import FakeEngine, engines
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, Site, text
from tests.integration.router.test_passthrough import offer, saying

from kvrouter.app.reload import follow
from kvrouter.app.settings import RouterSettings
from kvrouter.credentials.tls import Trust, server_context
from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.membership.probe_client import ProbeClient
from kvrouter.options.addresses import bare_address, parse_address


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def secured(authority: Authority, made: list[FakeEngine], *, asks: bool = False) -> None:
    """Put engines under TLS, on their ports; some ask for a certificate of the same CA."""
    for engine in made:
        engine.tls = server_context(*authority.sign(), authority.ca_file if asks else "")


Behind = Callable[..., Awaitable[Site]]


@pytest_asyncio.fixture
async def behind_tls(site: Open, authority: Authority) -> AsyncIterator[Behind]:
    """Opens a router before two engines, so many of them behind HTTPS."""
    async with engines(2) as made:

        async def open_site(count: int, *, asks: bool = False, **settings: Any) -> Site:
            secured(authority, made[:count], asks=asks)
            for engine in made:
                engine.manifest = "ab" * 32  # so that its blocks are known, and prompts tokenised
                await engine.stop()
                await engine.start()
            urls = [f"{'https' if e.tls else 'http'}://{e.address}" for e in made]
            settings = {"engine_ca_file": authority.ca_file, "policy": "prefix", **settings}
            here = await site(0, 0, addresses=(urls[:1], urls[1:]), **settings)
            here.prefill, here.decode = made[:1], made[1:]
            return here

        yield open_site


@pytest.mark.parametrize("count", [1, 2])
async def test_legs_probes_and_what_passes_through_go_by_https(
    behind_tls: Behind, count: int
) -> None:
    here = await behind_tls(count, kv_connector="auto", worker_api_key=["W"])
    offer(here.decode, saying(200, {"answer": 1}), "/rerank")
    assert (await here.post(text()))[0] == 200
    status, _, body = await here.post(text(stream=True, max_tokens=300))
    assert status == 200
    assert body.count(b"data: ") == 301
    assert (await here.post({"query": "q"}, "/rerank"))[0] == 200
    asked = {path for engine in (*here.prefill, *here.decode) for path, _ in engine.asked}
    assert asked >= {"/health", "/v1/models", "/version", "/v1/completions", "/tokenize", "/rerank"}
    for engine in (*here.prefill, *here.decode):
        known = here.app.core.pool.find(engine.address)
        assert known is not None
        assert known.address == engine.address
        assert known.tls is (engine.tls is not None)


async def test_an_engine_that_is_not_trusted_never_joins(
    behind_tls: Behind, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    here = await behind_tls(2, engine_ca_file=stranger.ca_file)
    assert (await here.post(text()))[0] == 503
    for engine in (*here.prefill, *here.decode):
        known = here.app.core.pool.find(engine.address)
        assert known is not None
        assert "certificate" in (here.app.members.prober.problem(known) or "").lower()
        assert engine.asked == []


def shown(signed: Signed) -> dict[str, Any]:
    """Settings of a router that shows this certificate."""
    return {"engine_cert_file": signed.cert_file, "engine_key_file": signed.key_file}


async def test_an_engine_that_asks_for_a_certificate_gets_it_with_every_request(
    behind_tls: Behind, authority: Authority
) -> None:
    here = await behind_tls(2, asks=True, **shown(authority.sign("router")))
    offer(here.decode, saying(200, {"answer": 1}), "/rerank")
    assert (await here.post(text()))[0] == 200
    assert (await here.post(text(stream=True)))[0] == 200
    assert (await here.post({"query": "q"}, "/rerank"))[0] == 200
    assert here.decode[0].requests
    assert all(engine.asked for engine in (*here.prefill, *here.decode))


async def test_an_engine_that_asks_for_a_certificate_says_so_to_a_router_without_one(
    behind_tls: Behind, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    for settings in ({}, shown(stranger.sign("router"))):
        here = await behind_tls(2, asks=True, **settings)
        assert (await here.post(text()))[0] == 503
        for engine in (*here.prefill, *here.decode):
            known = here.app.core.pool.find(engine.address)
            assert known is not None
            assert "--engine-cert-file" in (here.app.members.prober.problem(known) or "")
            assert engine.asked == []


async def test_a_certificate_that_is_renewed_is_shown_on_new_connections(
    behind_tls: Behind, authority: Authority, tmp_path: Path
) -> None:
    first = Authority(tmp_path, "stranger").sign("router")
    here = await behind_tls(2, asks=True, **shown(first))
    assert (await here.post(text()))[0] == 503
    for old, new in zip(first, authority.sign("router"), strict=True):
        Path(old).write_bytes(Path(new).read_bytes())
    follow(here.app, here.app.settings)
    await until(lambda: here.app.core.pool.engines(Role.DECODE))
    assert (await here.post(text()))[0] == 200


async def test_an_engine_that_changes_to_https_is_another_one(
    site: Open, authority: Authority
) -> None:
    here = await site(0, 1, admin=True, engine_ca_file=authority.ca_file)
    engine = here.decode[0]
    plain = here.app.core.pool.find(engine.address)
    assert (await here.post(text()))[0] == 200
    secured(authority, [engine])
    await engine.stop()
    await engine.start()
    url = f"https://{engine.address}"
    card = {"url": url, "worker_type": "regular"}
    headers = {"content-type": "application/json"}
    async with here.http.post(here.url("/workers"), json=card, headers=headers) as answer:
        assert (answer.status, (await answer.json())["url"]) == (202, url)
    await until(lambda: here.app.core.pool.engines(Role.DECODE))
    assert (await here.post(text()))[0] == 200
    assert here.app.core.pool.find(engine.address) is not plain
    for name in (url.replace("/", "%2F"), engine.address):
        async with here.http.get(here.url(f"/workers/{name}")) as answer:
            assert (await answer.json())["id"] == engine.address


async def test_the_doctor_goes_by_https_too(authority: Authority) -> None:
    made = FakeEngine()
    secured(authority, [made])
    await made.start()
    engine = Engine(made.address, Role.DECODE, tls=True)
    async with ProbeClient(trust=Trust(authority.ca_file)) as asker:
        assert b'"m"' in (await asker.ask(engine, "/v1/models", None, 20)).body
    await made.stop()


def test_an_engine_has_one_name_however_it_is_reached() -> None:
    settings = RouterSettings(
        prefill=["https://a:1", "a:2"],
        decode=["https://a:1"],
        bootstrap_port=["https://a:1=9"],
        data_parallel_size=["a:2=2"],
    )
    assert settings.engines == {"https://a:1": Role.BOTH, "a:2": Role.PREFILL}
    assert settings.bootstrap_ports == {"a:1": 9}
    pool = EnginePool()
    engine = pool.add(parse_address("HTTPS://A:1/"), Role.DECODE)
    assert (engine.address, engine.url, engine.tls) == ("a:1", "https://a:1", True)
    assert pool.find("a:1") is pool.find("https://a:1") is engine
    engine.set_ranks([0, 1])
    assert [rank.address for rank in engine.ranks] == ["a:1@0", "a:1@1"]
    assert {rank.url for rank in engine.ranks} == {"https://a:1"}
    assert bare_address("https://[::1]:5") == "[::1]:5"
    assert pool.assign("https://a:1", Role.PREFILL) is engine
    assert pool.assign("a:1", Role.PREFILL) is not engine
    assert [each.url for each in pool.all()] == ["http://a:1"]


def test_authorities_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a PEM file of CAs"):
        RouterSettings(decode=["https://d:1"], engine_ca_file=str(tmp_path / "absent"))


def test_a_certificate_that_cannot_be_shown_is_told(tmp_path: Path, authority: Authority) -> None:
    one, other = authority.sign(), authority.sign()
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"engine_key_file": one.key_file}, "--engine-key-file needs --engine-cert-file FILE"),
        ({"engine_cert_file": str(tmp_path / "absent")}, "absent: No such file or directory"),
        (shown(Signed(one.cert_file, other.key_file)), "give a certificate and its key"),
        ({"engine_cert_file": one.cert_file}, "can be read by others: chmod 600"),
    )
    for files, why in wrong:
        with pytest.raises(ValueError, match=why):
            RouterSettings(decode=["https://d:1"], **files)
