"""A real Prometheus on a free port of this host, with the configuration and rules of deploy/."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from math import isnan
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from tests.fakes.patience import until

from kvrouter.tools.demo.children import free_port

MISSING = "there is no prometheus (apt-get install prometheus)"
DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
PATIENCE_S = 60.0
LOOK_S = 0.2
Sample = tuple[dict[str, str], float]


def prometheus_program(name: str = "prometheus") -> str | None:
    """The program, or promtool; None where Debian's package prometheus is not installed."""
    return shutil.which(name)


class Prometheus:
    """Answers queries about what it scraped."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def query(self, expr: str) -> list[Sample]:
        """The series of an instant vector, and their values now."""
        found = await self._get("query", query=expr)
        if found["resultType"] == "scalar":
            return [({}, float(found["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in found["result"]]

    async def rules(self) -> list[dict[str, Any]]:
        """Every rule, with what came of its last evaluation."""
        groups = (await self._get("rules"))["groups"]
        return [rule for group in groups for rule in group["rules"]]

    async def without_number(self, wanted: Mapping[str, str]) -> list[str]:
        """Names of the queries that return no number, not even after a while."""
        missing = dict(wanted)

        async def have_numbers() -> bool:
            for name, expr in [*missing.items()]:
                if not all(isnan(value) for _, value in await self.query(expr)):
                    del missing[name]
            return not missing

        with suppress(TimeoutError):
            await until(have_numbers, PATIENCE_S, look_s=LOOK_S)
        return sorted(missing)

    async def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}/api/v1/{path}"
        async with self._http.get(url, params=parameters) as answer:
            document = await answer.json()
        assert document["status"] == "success", (parameters, document)
        return document["data"]


def configuration(targets: Mapping[str, Sequence[str]], token: str) -> dict[str, Any]:
    """That of deploy/, for these targets by job, each second; the store is shown a token."""
    text = (DEPLOY / "prometheus.yml").read_text()
    ours: dict[str, Any] = yaml.safe_load(text)
    ours["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    ours["rule_files"] = [str(DEPLOY / name) for name in ours["rule_files"]]
    assert {job["job_name"] for job in ours["scrape_configs"]} == targets.keys()
    for job in ours["scrape_configs"]:
        job["static_configs"] = [{"targets": [*targets[job["job_name"]]]}]
        if job["job_name"] == "kvstore":
            job["authorization"] = {"credentials": token}
    return ours


@asynccontextmanager
async def prometheus(
    folder: Path, targets: Mapping[str, Sequence[str]], token: str
) -> AsyncIterator[Prometheus]:
    """One that scrapes `targets`, HOST:PORT by job; it ends with its context."""
    program = prometheus_program()
    assert program is not None, MISSING
    file, port = folder / "prometheus.yml", free_port()
    file.write_text(yaml.safe_dump(configuration(targets, token)))
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(program, f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}"),
            *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
            cwd=folder,
            stderr=log,
        )
    try:
        async with aiohttp.ClientSession() as http:
            await _until_ready(f"http://127.0.0.1:{port}", http, folder / "prometheus.log")
            yield Prometheus(f"http://127.0.0.1:{port}", http)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _until_ready(url: str, http: aiohttp.ClientSession, log: Path) -> None:
    async def is_ready() -> bool:
        with suppress(aiohttp.ClientError):
            async with http.get(f"{url}/-/ready") as answer:
                return answer.status == 200
        return False

    try:
        await until(is_ready, PATIENCE_S, look_s=LOOK_S)
    except TimeoutError:
        raise AssertionError(log.read_text()) from None
