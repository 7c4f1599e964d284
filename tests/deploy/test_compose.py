"""deploy/ for real: build it, start it, ask it, and see by the engines' counters who did what."""

import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "docker-compose.yml"
PROJECT = "kvrouter-test"
ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
BLOCK = 64
PROMPT = list(range(1000, 1000 + 10 * BLOCK + 7))

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


class Deployment:
    """The running compose project, and what its services say."""

    def __init__(self, docker: str) -> None:
        self.command = [docker, "compose", "-f", str(FILE), "-p", PROJECT]
        self.environment = os.environ | {"KVROUTER_PUBLISHED_PORT": "0"}

    def compose(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            [*self.command, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if check and done.returncode:
            pytest.fail(f"docker compose {' '.join(arguments)}:\n{done.stdout[-6000:]}")
        return done.stdout

    def fetch(self, service: str, url: str) -> str:
        """What a service answers itself inside its container."""
        script = f"import urllib.request as r; print(r.urlopen({url!r}).read().decode())"
        return self.compose("exec", "-T", service, "python", "-c", script)

    def series(self, name: str, label: str) -> dict[str, dict[str, int]]:
        """One metric of every engine by one of its labels, as the engines expose it."""
        pattern = re.compile(rf'^{name}\{{.*{label}="(\w+)".*\}} (\S+)$', re.MULTILINE)
        url = "http://127.0.0.1:8000/metrics"
        return {
            engine: {key: int(float(n)) for key, n in pattern.findall(self.fetch(engine, url))}
            for engine in ENGINES
        }

    def complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """The answer to a completion asked at the published port."""
        address = self.compose("port", "router", "8000").strip()
        body = {"model": "sim", "prompt": prompt, "max_tokens": max_tokens}
        request = urllib.request.Request(
            f"http://{address}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            decoded: dict[str, Any] = json.load(answer)
        return decoded


@pytest.fixture(scope="module")
def deployment(docker: str) -> Iterator[Deployment]:
    """Everything up and healthy; taken down with its volumes afterwards."""
    project = Deployment(docker)
    began = time.monotonic()
    try:
        project.compose("up", "--build", "--wait", "--wait-timeout", "120")
        print(f"\ncompose up --build --wait took {time.monotonic() - began:.0f} s")
        yield project
    except BaseException:
        print(project.compose("logs", "--tail", "30", check=False)[-8000:])
        raise
    finally:
        project.compose("down", "--volumes", "--timeout", "5", check=False)


def test_a_prompt_of_several_blocks_is_prefilled_on_one_engine_and_decoded_on_another(
    deployment: Deployment,
) -> None:
    tokens = "vllm:prompt_tokens_by_source_total"
    before = deployment.series(tokens, "source")
    answer = deployment.complete(PROMPT, 20)
    after = deployment.series(tokens, "source")
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    gained = {
        engine: {source: n - before[engine][source] for source, n in counts.items() if n}
        for engine, counts in after.items()
    }
    worked = {name: counts for name, counts in gained.items() if any(counts.values())}
    print(worked)
    loadable = (len(PROMPT) - 1) // BLOCK * BLOCK
    prefill, decode = sorted(worked, reverse=True)
    assert prefill.startswith("prefill")
    assert worked[prefill]["local_compute"] == len(PROMPT)
    assert decode.startswith("decode")
    assert worked[decode]["external_kv_transfer"] == loadable
    assert worked[decode]["local_compute"] == len(PROMPT) - loadable


def test_the_image_has_what_options_of_the_router_need(deployment: Deployment) -> None:
    wanted = "dns.resolver, opentelemetry.proto, opentelemetry.sdk, requests, tokenizers, redis"
    deployment.compose("exec", "-T", "router", "python", "-c", f"import {wanted}")


def test_the_demo_in_the_image_gets_every_answer_right(docker: str, deployment: Deployment) -> None:
    command = [docker, "run", "--rm", "kvrouter:local", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert re.search(r"\b(\d+) of \1 answers complete and right", done.stdout), done.stdout[-3000:]
    assert done.returncode == 0


def test_engines_and_store_share_memory_across_containers(deployment: Deployment) -> None:
    used = deployment.series("kvsim:store_transport", "transport")
    expected = {"shm": 1, "unix": 0, "rdma": 0, "tcp": 0}
    assert used == dict.fromkeys(ENGINES, expected)


def test_only_loopback_is_published_and_nothing_runs_as_root(deployment: Deployment) -> None:
    assert deployment.compose("port", "router", "8000").startswith("127.0.0.1:")
    for service in (*ENGINES, "store", "router"):
        assert deployment.compose("exec", "-T", service, "id", "-u").strip() == "10001"
