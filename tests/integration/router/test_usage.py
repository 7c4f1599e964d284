"""What a request used is told to key, metric and log, whatever ends its stream."""

import asyncio
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import FakeEngine
from tests.fakes.patience import until
from tests.integration.router.conftest import Json, Open, Site, metric, text
from tests.integration.router.test_keys import Keys

from kvrouter.openai.request import parse
from kvrouter.openai.response import generated_tokens
from kvrouter.telemetry.request_log import RequestLog

USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SEVERAL = {"prompt": ["Hello, you there", "Good bye to you"]}
RESUMED = {"resume_streams": True}
SAMPLED = {"canary_sample_rate": 1.0}

WAYS: list[Any] = [
    pytest.param({}, {}, id="direct"),
    pytest.param({}, USAGE, id="usage"),
    pytest.param({}, SEVERAL, id="several"),
    pytest.param(RESUMED, {}, id="resumable"),
    pytest.param(RESUMED, USAGE, id="resumable usage"),
    pytest.param(
        RESUMED, {"prompt": ["Hello, you there", "Good bye to you"]}, id="resumable several"
    ),
    pytest.param(SAMPLED, {}, id="sampled"),
    pytest.param({**SAMPLED, **RESUMED}, {}, id="sampled resumable"),
]
"""Settings and members of requests for each way that a stream can take to its client."""


class Meter:
    """A router with one key, and what it has told of the key's requests."""

    def __init__(self, site: Open, folder: Path) -> None:
        self._site = site
        self._keys = Keys(folder)
        self._written = BytesIO()

    async def open(self, **settings: Any) -> Site:
        lines = RequestLog(self._written, plain=False)
        file = self._keys.write(a="tokens_per_min: 100000")
        self.here = await self._site(0, 1, api_key_file=file, lines=lines, **settings)
        return self.here

    @property
    def bearer(self) -> dict[str, str]:
        return self._keys.bearer("a")

    async def told(self, body: Json) -> list[float]:
        """Tokens generated, by its counter, its key's counter and its line."""
        (caller,) = self.here.app.core.access.ring.all()
        await until(lambda: self.here.app.core.metrics.running == 0)
        counted = await metric(self.here, "kvrouter:generation_tokens_total")
        (line,) = await self.lines()
        prompt = parse(json.dumps(body).encode(), "completion", 8).prompt_tokens
        return [counted, caller.tokens - prompt, line["generated"]]

    async def lines(self) -> list[Json]:
        """Its lines."""
        await self.here.app.close()
        return [json.loads(line) for line in self._written.getvalue().splitlines()]


def asked(**more: Any) -> Json:
    return text(**{"stream": True, "temperature": 0, "max_tokens": 8, **more})


async def leave_after(here: Site, body: Json, headers: dict[str, str], mark: bytes) -> None:
    """Read a stream until `mark` has come as often as there are prompts, and close it."""
    prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    got = b""
    async with here.http.post(here.url("/v1/completions"), json=body, headers=headers) as answer:
        while got.count(mark) < prompts:
            got += (await answer.content.readany()) or pytest.fail("the stream has ended")
        answer.close()


@pytest.mark.parametrize(("settings", "more"), WAYS)
async def test_a_client_that_leaves_has_used_what_it_has_got(
    site: Open, tmp_path: Path, settings: Json, more: Json
) -> None:
    meter, body = Meter(site, tmp_path), asked(**more)
    here = await meter.open(**settings)
    here.decode[0].mode = "hang_mid"
    await leave_after(here, body, meter.bearer, b'" t1"')
    shares = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    assert await meter.told(body) == [2 * shares] * 3


@pytest.mark.parametrize(("settings", "more"), WAYS)
async def test_a_stream_whose_engine_breaks_off_has_used_what_came(
    site: Open, tmp_path: Path, settings: Json, more: Json
) -> None:
    meter, body = Meter(site, tmp_path), asked(**more)
    here = await meter.open(**settings)
    here.decode[0].mode = "drop_mid"
    status, _, got = await here.post(body, **meter.bearer)
    assert (status, b'"error"' in got) == (200, True)
    came = got.count(b'" t0"') + got.count(b'" t1"')
    assert came >= 2
    assert await meter.told(body) == [came] * 3


@pytest.mark.parametrize(("settings", "more"), WAYS)
async def test_a_stream_that_the_router_cuts_off_has_used_what_came(
    site: Open, tmp_path: Path, settings: Json, more: Json
) -> None:
    meter, body = Meter(site, tmp_path), asked(**more)
    here = await meter.open(**settings)
    here.decode[0].mode = "hang_mid"
    got = bytearray()
    shares = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    async with here.http.post(
        here.url("/v1/completions"), json=body, headers=meter.bearer
    ) as answer:
        while got.count(b'" t1"') < shares:
            got += await answer.content.readany()
        await here.app.close()
        answer.close()
    (caller,) = here.app.core.access.ring.all()
    assert here.app.core.metrics.of("m").generation_tokens == 2 * shares
    assert caller.tokens > 2 * shares


@pytest.mark.parametrize(("settings", "more"), WAYS)
async def test_a_stream_read_to_its_end_has_used_its_tokens(
    site: Open, tmp_path: Path, settings: Json, more: Json
) -> None:
    meter, body = Meter(site, tmp_path), asked(**more)
    here = await meter.open(**settings)
    status, _, got = await here.post(body, **meter.bearer)
    assert status == 200
    assert got.endswith(b"data: [DONE]\n\n")
    shares = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    assert await meter.told(body) == [8 * shares] * 3


async def test_a_client_that_leaves_during_the_prefill_has_used_its_prompt(
    site: Open, tmp_path: Path
) -> None:
    keys = Keys(tmp_path)
    here = await site(api_key_file=keys.write(a="tokens_per_min: 0.6, token_burst: 5"))
    here.prefill[0].mode = "hang"
    leaving = asyncio.create_task(here.post(asked(), **keys.bearer("a")))
    await here.prefill[0].next_began()
    leaving.cancel()
    await here.prefill[0].next_left()
    (caller,) = here.app.core.access.ring.all()
    assert caller.tokens == len(asked()["prompt"]) // 4
    assert (await here.post(asked(), **keys.bearer("a")))[0] == 429


async def test_a_key_cannot_get_more_by_leaving_before_the_end(site: Open, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    here = await site(0, 1, api_key_file=keys.write(a="tokens_per_min: 0.6, token_burst: 14"))
    here.decode[0].mode = "hang_mid"
    for _ in range(2):  # each a prompt of 4 tokens and an answer of 2
        await leave_after(here, asked(), keys.bearer("a"), b'" t1"')
        await until(lambda: here.app.core.metrics.running == 0)
    assert (await here.post(asked(), **keys.bearer("a")))[0] == 429


@pytest.mark.parametrize("more", [USAGE, CONTINUOUS])
async def test_usage_tells_of_events_with_several_tokens(
    site: Open, tmp_path: Path, more: Json
) -> None:
    def batches(made: list[FakeEngine]) -> None:
        (engine,) = made
        engine.events = 2  # of four tokens each
        engine.usage = lambda body, tokens: FakeEngine.usage(engine, body, 8)  # type: ignore[method-assign]

    meter = Meter(site, tmp_path)
    here = await meter.open(prepare=batches)
    assert (await here.post(body := asked(**more), **meter.bearer))[0] == 200
    assert await meter.told(body) == [8, 8, 8]


def test_usage_of_one_choice_is_not_that_of_all() -> None:
    tail = b'"usage":{"prompt_tokens":5,"total_tokens":9,"completion_tokens":4}}\n\n'
    assert generated_tokens(tail, 12, whole=False) == 12
    assert generated_tokens(tail, 3, whole=False) == 4
    assert generated_tokens(tail + b"data: [DONE]\n\n", 12, whole=True) == 4
    assert generated_tokens(b'"usage":{"output_tokens": 7,', 12, whole=True) == 7
    assert generated_tokens(b"data: [DONE]\n\n", 12, whole=True) == 12
    assert generated_tokens(b'"completion_tokens":' + b"9" * 20, 12, whole=True) == 12


@pytest.mark.parametrize("more", [{"stream": False}, USAGE, {**SEVERAL, **USAGE}])
async def test_the_log_has_the_prompt_as_the_engine_counted_it(
    site: Open, tmp_path: Path, more: Json
) -> None:
    def counts(made: list[FakeEngine]) -> None:
        (engine,) = made
        engine.usage = lambda *_: {"prompt_tokens": 77, "completion_tokens": 8, "total_tokens": 85}  # type: ignore[method-assign]

    meter, asked_for = Meter(site, tmp_path), asked(**{"prompt": "Hello, you there", **more})
    here = await meter.open(prepare=counts)
    assert (await here.post(asked_for, **meter.bearer))[0] == 200
    (line,) = await meter.lines()
    prompts = 2 if isinstance(asked_for["prompt"], list) else 1
    assert line["prompt_tokens"] == 77 * prompts
