"""`kvrouter bench serve`."""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import islice
from typing import TYPE_CHECKING, Final

import aiohttp
import orjson
import uvloop

from kvrouter.options.complaints import UsageError
from kvrouter.tools.bench import load
from kvrouter.tools.bench.figures import WIDTH, Figures
from kvrouter.tools.bench.legs import RouterLegs
from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    from kvrouter.tools.bench.settings import BenchSettings
    from kvrouter.tools.timed_stream import TimedAnswer

ASK_S: Final = 10.0
SHOWN_ERRORS: Final = 10


def run(settings: BenchSettings) -> int:
    """Run the benchmark and print its figures; 0 if every request succeeded, else 1.

    Raises:
        UsageError: no OpenAI server answers at the URL.
    """
    return uvloop.run(_run(settings))


async def _run(settings: BenchSettings) -> int:
    timeout = aiohttp.ClientTimeout(total=settings.request_timeout)
    connector = aiohttp.TCPConnector(limit=0)
    key = settings.api_key.get_secret_value()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        model = settings.model or await _first_model(session, settings.base_url)
        trial = next(load.prompts(settings.model_copy(update={"seed": settings.seed + 1})))
        problem = (await load.send(session, settings, model, trial)).error
        if problem:
            raise UsageError(f"the trial request failed: {problem}")
        before = await _legs(session, settings.base_url)
        begun_s = time.perf_counter()
        answers = await load.run(session, settings, model)
        duration_s = time.perf_counter() - begun_s
        after = await _legs(session, settings.base_url)
    figures = Figures.of(answers, duration_s)
    _print_errors(answers)
    print("\n".join([*figures.rows(settings), *after.rows(before), "=" * WIDTH]))
    if settings.save_result is not None:
        found: dict[str, object] = {"model_id": model, **figures.as_json(settings)}
        found["legs"] = after.since(before)
        settings.save_result.write_bytes(orjson.dumps(found))
    return 1 if figures.failed else 0


async def _first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    try:
        async with asyncio.timeout(ASK_S), session.get(f"{base_url}/v1/models") as answer:
            if answer.status == 401:
                raise UsageError(f"{base_url} asks for a key (401); give --api-key")
            name: str = orjson.loads(await answer.read())["data"][0]["id"]
            return name
    except (aiohttp.ClientError, TimeoutError) as error:
        problem = reason_of(error) if isinstance(error, OSError) else str(error) or "no answer"
        raise UsageError(f"{base_url} cannot be asked ({problem}); give --base-url") from None
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"{base_url}/v1/models names no model; give --model") from None


async def _legs(session: aiohttp.ClientSession, base_url: str) -> RouterLegs:
    """The router's times so far; empty without a page of metrics."""
    try:
        async with asyncio.timeout(ASK_S), session.get(f"{base_url}/metrics") as answer:
            return RouterLegs.read(await answer.text() if answer.status == 200 else "")
    except (aiohttp.ClientError, TimeoutError):
        return RouterLegs({})


def _print_errors(answers: list[TimedAnswer]) -> None:
    errors = (each.error for each in answers if each.error)
    for number, error in enumerate(islice(errors, SHOWN_ERRORS)):
        print(f"Error {number}: {error}", file=sys.stderr)
