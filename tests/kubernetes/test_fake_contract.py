"""The fake API server is one for kubectl too: it lists in pages, watches, and is told of faults."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.certificates import Authority
from tests.fakes.kubernetes import KubernetesServer, server_tls
from tests.fakes.pods import endpoint, endpoint_slice, pod, write_kubeconfig

PATIENCE_S = 60.0
TOKEN = "a-token-of-the-test"


class Kubectl:
    """Runs the program against a server, with a kubeconfig and a home of its own."""

    def __init__(self, program: Path, folder: Path, config: Path) -> None:
        self._program = program
        self._folder = folder
        self._config = config

    async def begin(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            str(self._program),
            *arguments,
            env={"KUBECONFIG": str(self._config), "HOME": str(self._folder)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def __call__(self, *arguments: str) -> tuple[int, str, str]:
        process = await self.begin(*arguments)
        async with asyncio.timeout(PATIENCE_S):
            out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()

    @asynccontextmanager
    async def watching(self, *arguments: str) -> AsyncIterator["Lines"]:
        shown = '-o=jsonpath={.type} {.object.metadata.name}{"\\n"}'
        process = await self.begin("get", *arguments, "--watch", "--output-watch-events", shown)
        try:
            yield Lines(process)
        finally:
            process.kill()
            await process.communicate()


class Lines:
    """The lines of a watch, as words, when they come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self._output = process.stdout

    async def next(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return " ".join((await self._output.readline()).decode().split())


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[KubernetesServer]:
    started = KubernetesServer(server_tls(Authority(tmp_path)))
    started.token = TOKEN
    await started.start()
    yield started
    await started.stop()


@pytest.fixture
def run(server: KubernetesServer, program: Path, tmp_path: Path) -> Kubectl:
    ca = str(tmp_path / "ca.pem")
    config = write_kubeconfig(tmp_path, server.url, user={"token": TOKEN}, ca=ca)
    return Kubectl(program, tmp_path, config)


async def test_it_lists_what_was_put_in_pages_and_by_label(
    server: KubernetesServer, run: Kubectl
) -> None:
    for n in range(7):
        server.put("pods", f"vllm-{n}", **pod(f"10.0.0.{n}"))
    server.put("pods", "web", metadata={"labels": {"app": "web"}})
    code, out, err = await run("get", "pods", "--chunk-size=3", "-l", "app=engine", "-o", "json")
    assert (code, err) == (0, "")
    found = {each["metadata"]["name"]: each for each in json.loads(out)["items"]}
    assert set(found) == {f"vllm-{n}" for n in range(7)}
    assert found["vllm-3"]["status"]["podIP"] == "10.0.0.3"
    assert len([path for path, query in server.asked if "limit" in query]) == 3


async def test_a_watch_tells_what_comes_changes_and_goes(
    server: KubernetesServer, run: Kubectl
) -> None:
    server.put("pods", "vllm-0", **pod())
    async with run.watching("pods", "-l", "app=engine") as lines:
        assert await lines.next() == "ADDED vllm-0"
        await server.until_watched()
        server.put("pods", "vllm-1", **pod())
        assert await lines.next() == "ADDED vllm-1"
        server.put("pods", "vllm-1", **pod(ready=False))
        assert await lines.next() == "MODIFIED vllm-1"
        server.bookmark()
        assert await lines.next() == "BOOKMARK"
        server.put("pods", "vllm-1", **pod() | {"metadata": {"labels": {"app": "old"}}})
        assert await lines.next() == "DELETED vllm-1"
        server.delete("pods", "vllm-0")
        assert await lines.next() == "DELETED vllm-0"


async def test_slices_of_a_service_are_listed_and_watched(
    server: KubernetesServer, run: Kubectl
) -> None:
    selector = "kubernetes.io/service-name=engines"
    async with run.watching("endpointslices", "-l", selector) as lines:
        await server.until_watched()
        server.put("endpointslices", "engines-a", **endpoint_slice(endpoint("10.0.0.1", "a")))
        assert await lines.next() == "ADDED engines-a"
    code, out, _ = await run("get", "endpointslices", "-o", "json")
    assert (code, len(json.loads(out)["items"])) == (0, 1)


async def test_its_errors_are_told_as_those_of_a_server(
    server: KubernetesServer, run: Kubectl
) -> None:
    server.mood = "refuses"
    code, _, err = await run("get", "pods")
    assert (code, "Error from server (Forbidden)" in err) == (1, True)
    server.mood, server.token = "answers", "another"
    code, _, err = await run("get", "pods")
    assert (code, "must be logged in to the server" in err) == (1, True)
    server.token, server.forgets = TOKEN, "status"
    server.put("pods", "vllm-0", **pod())
    code, _, err = await run("get", "pods", "--watch-only")
    assert (code, "too old resource version" in err) == (1, True)
