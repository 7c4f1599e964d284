"""deploy/docker-compose.engines.yml: real vLLM engines in containers, without a GPU.

Their environment of 3.5 GB is mounted from this machine (KVROUTER_VLLM_PYTHON names its python), so
that no image of that size is pulled; the base image has only what vLLM needs of the system.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.deploy.project import DEPLOY, Project, complete, wait_until
from tests.vllm.install import install_into
from tests.vllm.models import TINY, model_folder

FILE = DEPLOY / "docker-compose.engines.yml"
PYTHON = "python:3.11-slim-bookworm"
BASE = "kvrouter-vllm-system:test"
SYSTEM = f"""
FROM {PYTHON}
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 libstdc++6
"""
MODEL = {"MODEL": "/models"}
PROMPT = list(range(100, 900))
BOTH = {"prefill": 1, "decode": 1}
FLAGS = "--dtype=float32 --enforce-eager --max-model-len=4096"  # this is a small machine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("profile", "kind"),
    [("vllm-cpu", "cpu"), ("vllm", "gpu"), ("vllm-nixl", "nixl"), ("sglang", "sglang")],
)
def test_a_profile_is_a_router_before_a_prefill_and_a_decode_engine(
    docker: str, profile: str, kind: str
) -> None:
    told = Project(docker, [FILE], profile, MODEL).compose("config", "--format", "json")
    services = json.loads(told)["services"]
    through_store = {"store", "router"} if kind in ("cpu", "gpu") else {"router-without-store"}
    assert services.keys() == {*through_store, f"prefill-{kind}", f"decode-{kind}"}


def test_a_model_has_to_be_named(docker: str) -> None:
    told = Project(docker, [FILE], "vllm", {"MODEL": ""}).compose("config", "-q", check=False)
    assert "set it to a folder below /models" in told


@pytest.fixture
def project(docker: str, tmp_path: Path) -> Iterator[Project]:
    """The project with the engines' environment and model mounted."""
    named = os.environ.get("KVROUTER_VLLM_PYTHON")
    if not named:
        pytest.skip("no vLLM environment: set KVROUTER_VLLM_PYTHON, see tests/vllm/make_env.sh")
    python = Path(named)
    install_into(python)
    site = python.parents[1] / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    subprocess.run(
        [docker, "build", "-q", "-t", BASE, "-"], input=SYSTEM, text=True, check=True, timeout=400
    )
    services = {
        name: {
            "build": {"args": {"BASE": BASE, "BUILDER": PYTHON}},
            "environment": {"PYTHONPATH": "/site", "VLLM_CPU_OMP_THREADS_BIND": core},
            "volumes": [f"{site}:/site:ro", f"{model_folder(TINY, python)}:/models:ro"],
        }
        for name, core in (("prefill-cpu", "0"), ("decode-cpu", "1"))
    }
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "STORE_MEMORY": "1GiB", "ENGINE_FLAGS": FLAGS}
    override = tmp_path / "override.yml"
    override.write_text(yaml.safe_dump({"services": services}))
    with Project(docker, [FILE, override], "vllm-cpu", MODEL | small).up() as project:
        yield project


def test_decode_loads_from_the_store_what_prefill_computed(project: Project) -> None:
    # The router is healthy when one engine answers, and serves with that until both do.
    wait_until(lambda: project.series("router", "kvrouter:worker_up", "role") == BOTH)
    answer = complete(project.address("router", 8000), "model", PROMPT, 4)
    assert answer["usage"]["completion_tokens"] == 4
    tokens = project.series("decode-cpu", "vllm:prompt_tokens_by_source_total", "source")
    landings = project.series("router", "kvrouter:landings_total", "outcome")
    print(f"decode had its tokens from {tokens}; landings: {landings}")
    if not tokens["external_kv_transfer"]:
        pytest.fail(project.compose("logs", "--tail", "30", check=False)[-8000:])
