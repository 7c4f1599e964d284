"""The files that tests/test_budgets.py counts as the request path are those that run."""

from pathlib import Path

from tests.fakes.engine import BLOCK_TOKENS, FakeEngine
from tests.fakes.store import StoreProcess
from tests.fakes.trace import Trace
from tests.integration.router.ahead import MANIFEST
from tests.integration.router.conftest import Open, text
from tests.test_budgets import REQUEST_PATH

import kvrouter

ROUTER = Path(kvrouter.__file__).parent  # where it is installed: also wheels run these tests
COUNTED = ("openai/", "serving/", "routing/", "http/client/")
BESIDE = ("settle", "recording", "request/summary", "request/evidence", "streaming/keep_alive")
AFTERWARDS = {f"serving/{name}.py" for name in BESIDE}  # or at a tick of a timer
COUNTED_FILES = ("http/server/exchange.py", "http/headers.py")


def with_a_manifest(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.manifest = MANIFEST.digest.hex()


async def test_a_streamed_completion_runs_through_the_files_that_are_counted(
    site: Open, node: StoreProcess
) -> None:
    here = await site(
        policy="prefix",
        store=node.url,
        landing_timeout_s=0.01,
        health_interval_s=60.0,
        prepare=with_a_manifest,
    )
    body = text(prompt=list(range(100, 100 + 3 * BLOCK_TOKENS + 5)), stream=True)
    assert (await here.post(body))[0] == 200  # connections are there, modules are imported
    with Trace((ROUTER,)) as trace:
        assert (await here.post(body))[0] == 200
    print(f"\na streamed completion: {trace}")
    ran = {name for name in trace.files if name.startswith(COUNTED) or name in COUNTED_FILES}
    assert ran - AFTERWARDS == set(REQUEST_PATH)
