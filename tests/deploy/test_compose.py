"""docker-compose.yml for real: who does what, by the engines' counters, and who comes back."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.deploy.project import DEPLOY, Project, complete, wait_until

ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
SERVICES = (*ENGINES, "store", "router")
BLOCK = 64
PROMPT = list(range(1000, 1000 + 10 * BLOCK + 7))

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def project(docker: str) -> Iterator[Project]:
    with Project(docker, [DEPLOY / "docker-compose.yml"]).up() as project:
        yield project


def test_a_prompt_of_several_blocks_is_prefilled_on_one_engine_and_decoded_on_another(
    project: Project,
) -> None:
    def tokens() -> dict[str, dict[str, int]]:
        name = "vllm:prompt_tokens_by_source_total"
        return {engine: project.series(engine, name, "source") for engine in ENGINES}

    before = tokens()
    answer = complete(project.address("router", 8000), "sim", PROMPT, 20)
    after = tokens()
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


def test_engines_and_store_share_memory_across_containers(project: Project) -> None:
    expected = {"shm": 1, "unix": 0, "rdma": 0, "tcp": 0}
    for engine in ENGINES:
        assert project.series(engine, "kvsim:store_transport", "transport") == expected


def test_the_router_knows_the_caches_of_all_engines_exactly(project: Project) -> None:
    page = project.inside("router", "http://127.0.0.1:8000/metrics")
    exact = re.findall(r'^kvrouter:kv_index_state\{engine="(\S+?):8000".*"exact".*\} 1', page, re.M)
    assert sorted(exact) == sorted(ENGINES)


def test_only_loopback_is_published_and_nothing_runs_as_root(project: Project) -> None:
    assert project.address("router", 8000).startswith("127.0.0.1:")
    for service in SERVICES:
        assert project.compose("exec", "-T", service, "id", "-u").strip() == "10001"


@pytest.mark.skipif(os.geteuid() != 0, reason="it kills a container's process: run as root")
def test_a_router_that_crashes_is_started_again(docker: str, project: Project) -> None:
    def state() -> dict[str, Any]:
        name = project.compose("ps", "-q", "router").strip()
        told = subprocess.run([docker, "inspect", name], capture_output=True, check=True)
        return {"id": name, **json.loads(told.stdout)[0]["State"]}

    def back() -> bool:
        now = state()
        health = now["Health"]
        return now["Pid"] not in (0, before["Pid"]) and health["Status"] == "healthy"

    before = state()
    os.kill(before["Pid"], signal.SIGKILL)
    wait_until(back)
    assert state()["id"] == before["id"]
    assert complete(project.address("router", 8000), "sim", PROMPT, 2)["usage"]


def test_every_process_ends_by_itself_when_it_is_told_to_stop(project: Project) -> None:
    project.compose("stop")
    lines = project.compose("ps", "-a", "--format", "json").splitlines()
    ended = {each["Service"]: each["ExitCode"] for each in map(json.loads, lines)}
    assert ended == dict.fromkeys(SERVICES, 0)


def test_the_smoke_script_sees_every_kind_of_container_die_and_every_prompt_answered(
    docker: str,
) -> None:
    script = [sys.executable, str(DEPLOY / "smoke.py")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    killed = re.findall(
        r"^(prefill|decode|store|router)\S* (?:killed, and )?back", done.stdout, re.M
    )
    assert killed == ["prefill", "decode", "store", "router"]
