"""`kvrouter bench serve` as a command, before a router with a store and simulated engines."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvrouter.tools.demo.children import Children

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
LOAD = ("--num-prompts", "20", "--random-input-len", "100", "--random-output-len", "7")


async def bench(*flags: str) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter", "bench", "serve", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def urls(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, str]]:
    """A router, and its decode engine."""
    folder = tmp_path_factory.mktemp("bench")
    async with Children(folder) as children:
        store = await children.start(
            *("store", "store", "--port", "0", "--http-port", "0", "--memory", "64MiB"),
            *("--unix-socket", str(folder / "store.sock")),
        )
        common = ("--port", "0", "--model", "tiny", "--block-size", "16")
        shared = (*common, "--kv-bytes-per-token", "256", "--store", store.urls["kv"])
        prefill = await children.start("prefill", "sim", "--role", "prefill", *shared)
        decode = await children.start("decode", "sim", "--role", "decode", *shared)
        router = await children.start(
            *("router", "serve", "--port", "0", "--store", store.urls["kv"]),
            *("--prefill", prefill.http, "--decode", decode.http),
        )
        yield router.http, decode.http


async def test_it_prints_vllms_rows_and_the_routers_legs(
    urls: tuple[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    flags = (*LOAD, "--ignore-eos", "--max-concurrency", "4", "--save-result", str(file))
    status, out, errors = await bench("--base-url", urls[0], *flags)
    assert (status, errors) == (0, "")
    rows = {line[:40].strip(): line[40:].strip() for line in out.splitlines()}
    assert rows["Successful requests:"] == "20"
    assert rows["Total input tokens:"] == "2000"
    assert rows["Total generated tokens:"] == "140"
    assert rows["Prefill legs:"] == "20"
    assert {"Mean landing (ms):", "Mean decode leg (ms):", "P99 ITL (ms):"} <= rows.keys()
    result = json.loads(file.read_bytes())
    assert (result["completed"], result["model_id"]) == (20, "tiny")
    assert f"{result['mean_ttft_ms']:.2f}" == rows["Mean TTFT (ms):"]
    assert result["legs"]["prefill leg"]["count"] == 20


async def test_an_engine_alone_has_no_legs(urls: tuple[str, str]) -> None:
    status, out, _ = await bench("--base-url", urls[1], *LOAD, "--request-rate", "500")
    assert status == 0
    assert "Request rate configured (RPS):           500.00" in out
    assert "Legs" not in out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--base-url", "http://127.0.0.1:1"), "give --base-url"),
        (("--random-input-len", "100000"), "maximum context length"),
        (("--model", "other"), "the trial request failed: status 404"),
        (("--random-token-ids", "9"), "random-token-ids"),
        (("--metric-percentiles", "0"), "a percentile is above 0"),
    ],
)
async def test_what_cannot_be_sent_is_said_in_a_sentence(
    urls: tuple[str, str], flags: tuple[str, str], sentence: str
) -> None:
    status, out, errors = await bench("--base-url", urls[0], *LOAD, *flags)
    assert (status, out) == (2, "")
    assert errors.startswith("kvrouter bench serve: ")
    assert sentence in errors
    assert errors.count("\n") == 1


async def test_a_router_with_keys_needs_one(urls: tuple[str, str], tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        router = await children.start(
            *("router", "serve", "--port", "0", "--decode", urls[1], "--api-key", "a-key")
        )
        flags = ("--base-url", router.http, *LOAD)
        status, _, errors = await bench(*flags)
        assert status == 2
        assert "asks for a key (401); give --api-key" in errors
        status, out, errors = await bench(*flags, "--api-key", "a-key")
        assert (status, errors) == (0, "")
        assert "Successful requests:" in out
