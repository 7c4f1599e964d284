"""`--salt-from-key`: what one tenant has asked is found by no other one."""

import json
import re
from array import array
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError
from tests.fakes.engine import BLOCK_TOKENS, FakeEngine
from tests.integration.router.conftest import Open, Site, chat, metric, text
from tests.integration.router.test_keys import Keys
from tests.integration.router.test_passthrough import offer, saying

from kvrouter.app.build import build
from kvrouter.app.settings import RouterSettings
from kvrouter.serving.request.caller_salt import derived
from kvrouter.tools.sim.serve import SimServer
from kvrouter.tools.sim.settings import SimSettings
from kvrouter_store.identity.chain import hash_tokens, root_hash

PROMPT = list(range(100, 100 + 3 * BLOCK_TOKENS + 5))
IDS, ROOT = array("I", PROMPT), root_hash(None)
CLASSIFY = "/v1/classify"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def announce(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.manifest = "ab" * 32  # so that its blocks are known


async def two_tenants(site: Open, keys: Keys, *counts: int, **settings: Any) -> Site:
    file = keys.write(one="", two="")
    return await site(*counts, api_key_file=file, salt_from_key=True, **settings)


def salts(engines: list[FakeEngine]) -> list[str]:
    return [request["cache_salt"] for engine in engines for request in engine.requests]


async def test_both_legs_carry_the_salt_of_the_key(site: Open, keys: Keys) -> None:
    here = await two_tenants(site, keys)
    for name in ("one", "two", "one"):
        assert (await here.post(text(), **keys.bearer(name)))[0] == 200
    assert (
        salts(here.prefill) == salts(here.decode) == [derived(n, "") for n in ("one", "two", "one")]
    )


async def test_a_clients_own_salt_parts_its_prompts_but_reaches_no_other_tenants(
    site: Open, keys: Keys
) -> None:
    here = await two_tenants(site, keys, 0, 1)
    mine = derived("one", "")
    for own in ("a", mine):
        assert (await here.post(text(cache_salt=own), **keys.bearer("two")))[0] == 200
    assert salts(here.decode) == [derived("two", "a"), derived("two", mine)]
    assert mine not in salts(here.decode)


@pytest.mark.parametrize("more", [{"prompt": ["a b", "c"]}, {"n": 2}, {"stream": True}])
async def test_every_share_of_a_request_has_the_salt(
    site: Open, keys: Keys, more: dict[str, Any]
) -> None:
    here = await two_tenants(site, keys)
    assert (await here.post(text(**more), **keys.bearer("one")))[0] == 200
    assert {*salts(here.prefill), *salts(here.decode)} == {derived("one", "")}


async def test_a_prompt_of_one_tenant_is_found_for_it_alone(site: Open, keys: Keys) -> None:
    here = await two_tenants(site, keys, 0, 1, policy="prefix", prepare=announce)
    assert (await here.post(text(prompt=PROMPT), **keys.bearer("one")))[0] == 200
    names = (derived("one", ""), derived("two", ""), None)
    chains = [hash_tokens(IDS, BLOCK_TOKENS, root=ROOT, cache_salt=name).data for name in names]
    found = [sum(here.app.core.index.match(chain).values()) for chain in chains]
    assert found == [3, 0, 0]


async def test_a_text_that_another_tenant_has_asked_is_tokenised_again(
    site: Open, keys: Keys
) -> None:
    here = await two_tenants(site, keys, 0, 1, policy="prefix", prepare=announce)
    hits = []
    for tenant in ("one", "two", "one"):
        assert (await here.post(text(), **keys.bearer(tenant)))[0] == 200
        hits.append(await metric(here, 'kvrouter:tokenize_total{kind="cache_hits"}'))
    assert hits == [0, 0, 1]


async def test_a_trusted_proxy_names_the_tenant(site: Open) -> None:
    proxy: dict[str, Any] = {"trusted_proxies": ["127.0.0.1"], "tenant_header": "x-tenant"}
    here = await site(0, 1, salt_from_key=True, **proxy)
    for tenant in ("a", "b"):
        assert (await here.post(text(), **{"x-tenant": tenant}))[0] == 200
    assert salts(here.decode) == [derived("a", ""), derived("b", "")]


async def test_what_reads_no_salt_is_refused_and_reaches_no_engine(site: Open, keys: Keys) -> None:
    def prepare(engines: list[FakeEngine]) -> None:
        engines[0].endpoints = ("/v1/completions", "/v1/messages", CLASSIFY, "/tokenize")
        engines[0].salted = ("/v1/completions", CLASSIFY)

    here = await two_tenants(site, keys, 0, 1, prepare=prepare)
    offer(here.decode, saying(200, {"answer": 1}), "/v1/messages", CLASSIFY)
    status, _, answer = await here.post(chat(), "/v1/messages", **keys.bearer("one"))
    assert (status, json.loads(answer)["error"]["type"]) == (501, "api_error")
    assert "--salt-from-key" in json.loads(answer)["error"]["message"]
    assert here.decode[0].posted == []
    for path, more in ((CLASSIFY, {"cache_salt": derived("one", "")}), ("/tokenize", {})):
        asked = {"model": "m", "prompt": "a"}
        assert (await here.post(asked, path, **keys.bearer("one")))[0] == 200
        if path == CLASSIFY:
            assert json.loads(here.decode[0].posted[0][1]) == asked | more


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
async def test_simulated_engines_reuse_what_the_same_tenant_has_asked(
    keys: Keys, path: str
) -> None:
    said = " ".join(map(str, range(200)))
    body = {"model": "m", "max_tokens": 1, "max_output_tokens": 1, "prompt": said, "input": said}
    body["messages"] = [{"role": "user", "content": said}]
    sim = SimServer(SimSettings(model="m", port=0))
    app = build(
        RouterSettings(
            decode=[f"127.0.0.1:{await sim.start()}"],
            port=0,
            api_key_file=keys.write(one="", two=""),
            salt_from_key=True,
        )
    )
    port, reused = await app.start(), []
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            for name in ("one", "two", "one", "two"):
                async with http.post(path, json=body, headers=keys.bearer(name)) as answer:
                    told = re.search(r'"cache\w*tokens": ?(\d+)', await answer.text())
                    assert told is not None, await answer.text()
                    reused.append(int(told[1]))
    finally:
        await app.close()
        await sim.close()
    assert reused == [0, 0, reused[3], reused[2]]
    assert reused[2] > 0


async def test_a_server_that_may_drop_a_salt_gets_no_prompt(site: Open, keys: Keys) -> None:
    here = await two_tenants(site, keys, 0, 1, kv_connector="openai")
    assert (await here.post(text(), **keys.bearer("one")))[0] == 501
    assert here.decode[0].requests == []


def test_without_tenants_there_is_nothing_to_keep_apart() -> None:
    with pytest.raises(ValidationError, match="needs tenants: give --api-key-file"):
        RouterSettings(decode=["127.0.0.1:1"], salt_from_key=True)


async def test_a_form_that_no_engine_can_salt_is_a_501(site: Open, keys: Keys) -> None:
    def listing(engines: list[FakeEngine]) -> None:
        for engine in engines:
            engine.endpoints = ("/v1/completions", "/v1/audio/transcriptions")

    here = await two_tenants(site, keys, 0, 1, prepare=listing)
    kind = {"content-type": "multipart/form-data; boundary=x", **keys.bearer("one")}
    head = b'content-disposition: form-data; name="model"'
    body = b"--x\r\n%b\r\n\r\nm\r\n--x--" % head
    assert (await here.post(body, "/v1/audio/transcriptions", **kind))[0] == 501
    assert here.decode[0].posted == []
