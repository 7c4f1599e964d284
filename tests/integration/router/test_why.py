"""Why prompt tokens were computed: the metric, the log, `kvrouter why` and what refuses it."""

import asyncio
import json
import re
from io import BytesIO
from pathlib import Path

from pydantic import SecretStr
from tests.fakes.engine import BLOCK_TOKENS, FakeEngine
from tests.fakes.store import StoreProcess
from tests.integration.router.ahead import MANIFEST
from tests.integration.router.conftest import Json, Open, Site, text
from tests.integration.router.test_control import fetch
from tests.integration.router.test_keys import Keys
from tests.integration.router.test_status_command import control
from tests.integration.why.pictures import shown
from tests.integration.why.planted import kvrouter

from kvrouter.fates.fate import Fate
from kvrouter.telemetry.request_log import RequestLog

IDS = list(range(100, 100 + 4 * BLOCK_TOKENS + 3))
PROMPT: Json = {"prompt": IDS}
SITE: Json = {"policy": "prefix", "control_port": 0, "health_interval_s": 60.0}


async def ladder(here: Site, query: str = "") -> dict[str, int]:
    status, _, body = await fetch(here, f"/why{query}")
    assert status == 200
    rows = re.findall(r"^ +([\d,]+) +[\d.]+% +(.+)$", body.decode(), re.M)
    named = {fate.words: fate for fate in Fate}
    return {named[words]: int(tokens.replace(",", "")) for tokens, words in rows}


def cached(tokens: int, skew: int = 0) -> object:
    """Engines with known blocks, which say that they reused so many tokens of each prompt."""

    def prepare(made: list[FakeEngine]) -> None:
        for engine in made:
            engine.manifest, engine.cached_tokens = MANIFEST.digest.hex(), tokens
            engine.skew = skew

    return prepare


async def test_the_metric_the_log_and_the_ladder_say_the_same(site: Open) -> None:
    written = BytesIO()
    lines = RequestLog(written, plain=False)
    here = await site(0, 1, lines=lines, prepare=cached(2 * BLOCK_TOKENS), **SITE)
    assert (await here.post(text(**PROMPT)))[0] == 200
    told = await ladder(here)
    assert told == {"engine": 32, "first_use": 32, "tail": 3}
    lines.flush()
    line = json.loads(written.getvalue())
    assert line["fates"] == told
    assert sum(told.values()) == line["prompt_tokens"] == len(IDS)
    for fate, tokens in told.items():
        series = f'kvrouter:prompt_tokens_by_fate_total{{fate="{fate}",model="m"}}'
        _, _, body = await fetch(here, "/metrics")
        assert f"{series} {float(tokens)}" in body.decode().splitlines()


async def test_every_prompt_of_a_request_has_its_fates(site: Open) -> None:
    here = await site(0, 1, **SITE)
    assert (await here.post(text(prompt=[IDS, IDS[:20]])))[0] == 200
    assert sum((await ladder(here)).values()) == len(IDS) + 20


async def test_a_request_that_no_engine_answered_has_none(site: Open) -> None:
    here = await site(0, 1, **SITE)
    here.decode[0].mode = "500"
    assert (await here.post(text(**PROMPT)))[0] >= 500
    assert await ladder(here) == {}


async def test_a_ladder_is_of_one_key_or_session(site: Open, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    file = keys.write(one="", other="")
    here = await site(0, 1, api_key_file=file, **SITE)
    headers = {**keys.bearer("one"), "x-session-id": "mine"}
    assert (await here.post(text(**PROMPT), **headers))[0] == 200
    assert (await here.post(text(prompt=IDS[:9]), **keys.bearer("other")))[0] == 200
    for query in ("?key=one", "?session=mine", "?key=one&model=m"):
        assert sum((await ladder(here, query)).values()) == len(IDS)
    assert await ladder(here, "?session=other") == {}


async def test_kv_that_landed_too_late_is_named(site: Open, node: StoreProcess) -> None:
    late = {"store": node.url, "landing_timeout_s": 0.01}
    here = await site(1, 1, prepare=cached(0), **late, **SITE)
    assert (await here.post(text(**PROMPT)))[0] == 200
    assert await ladder(here) == {"landed_late": 64, "tail": 3}
    shown("late", (await kvrouter("why", "--url", control(here)))[1])


async def test_engines_that_count_other_tokens_than_the_router_are_named(site: Open) -> None:
    here = await site(0, 1, prepare=cached(0, skew=1), **SITE)
    for _ in range(2):
        assert (await here.post(text(**PROMPT)))[0] == 200
    assert (await ladder(here))["other_tokens"] == 64
    shown("tokens", (await kvrouter("why", "--url", control(here)))[1])


async def test_a_prompt_that_must_stay_whole_cannot_be_shared(site: Open) -> None:
    here = await site(1, 1, prepare=cached(0), **SITE)
    for _ in range(2):
        asked = text(prompt=list(range(100, 500)), echo=True)
        assert (await here.post(asked))[0] == 200
    assert (await ladder(here))["not_shared"] == 384


async def test_the_story_of_a_request_tells_what_happened_in_order(site: Open) -> None:
    here = await site(1, 1, **SITE)
    assert (await here.post(text(**PROMPT), **{"x-request-id": "mine/1"}))[0] == 200
    code, out, err = await kvrouter("why", "mine/1", "--url", control(here))
    assert (code, err) == (0, "")
    steps = re.findall(r"^(prompt|match|plan|landing|load|report)  ", out, re.M)
    assert [step for step in steps if step != "landing"] == ["prompt", "match", "plan", "report"]
    assert f"prefill on {here.prefill[0].address}" in out


async def refused(*arguments: str, **environment: str) -> str:
    code, out, err = await kvrouter("why", *arguments, **environment)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


async def test_a_request_that_is_not_known_is_one_sentence_and_2(site: Open) -> None:
    here = await site(**SITE)
    told = await refused("other", "--url", control(here))
    assert "answers 404; give the x-request-id of an answer to one of its last" in told


async def test_a_router_without_a_control_port_is_one_sentence_and_2(site: Open) -> None:
    here = await site()
    assert "start the router with --control-port" in await refused("--url", here.url(""))
    assert "does not answer" in await refused("--url", "127.0.0.1:9")


async def test_the_endpoints_require_the_admin_token(site: Open) -> None:
    here = await site(admin_token=SecretStr("sesame"), **SITE)
    assert "KVROUTER_STATUS_TOKEN" in await refused("--url", control(here))
    code, out, _ = await kvrouter("why", "--url", control(here), KVROUTER_STATUS_TOKEN="sesame")
    assert (code, out.splitlines()[0]) == (0, "No request with a prompt has ended lately.")


async def test_requests_at_once_are_told_from_each_other(site: Open) -> None:
    here = await site(0, 2, **SITE)
    asked = [here.post(text(prompt=[n, *IDS])) for n in range(8)]
    assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}
    told = await ladder(here)
    assert sum(told.values()) == 8 * (len(IDS) + 1)


async def test_the_doctor_begins_with_what_the_router_says_first(site: Open) -> None:
    here = await site(0, 1, **SITE)
    assert (await here.post(text(**PROMPT)))[0] == 200
    _, why, _ = await kvrouter("why", "--url", control(here))
    port = control(here).rpartition(":")[2]
    engine = ("--decode", here.decode[0].address)
    _, out, _ = await kvrouter("doctor", *engine, "--control-port", port)
    assert out.splitlines()[0] == why.splitlines()[0]
    _, out, _ = await kvrouter("doctor", *engine, "--control-port", "9")
    assert "tokens" not in out.splitlines()[0]
