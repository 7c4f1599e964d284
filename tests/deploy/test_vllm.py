"""deploy/docker-compose.vllm.yml: real vLLM engines in containers, without a GPU.

Their environment of 3.5 GB is mounted from this machine (KVROUTER_VLLM_PYTHON names its python), so
that no image of that size is made; the image has the system's part of deploy/Dockerfile.vllm.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.vllm.install import install_into
from tests.vllm.models import TINY, model_folder

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "docker-compose.vllm.yml"
IMAGE = "kvrouter-vllm-system:test"
PROMPT = list(range(100, 900))
FLAGS = ["--dtype=float32", "--enforce-eager", "--max-model-len=4096"]  # this is a small machine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


def compose(
    docker: str, files: list[Path], *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    named = [word for file in files for word in ("-f", str(file))]
    return subprocess.run(
        [docker, "compose", *named, "-p", "kvrouter-vllm-test", *words],
        env={**os.environ, "MODEL": "/models", "KVROUTER_PUBLISHED_PORT": "0", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=800,
    )


@pytest.mark.parametrize("profile", ["vllm", "vllm-cpu"])
def test_a_profile_is_a_valid_project(docker: str, profile: str) -> None:
    done = compose(docker, [FILE], "--profile", profile, "config", "--format", "json")
    assert done.returncode == 0, done.stdout[-3000:]
    services = json.loads(done.stdout)["services"]
    kind = "gpu" if profile == "vllm" else "cpu"
    assert services.keys() == {"store", "router", f"prefill-{kind}", f"decode-{kind}"}


def test_a_model_has_to_be_named(docker: str) -> None:
    done = compose(docker, [FILE], "--profile", "vllm", "config", "-q", MODEL="")
    assert done.returncode != 0
    assert "set it to a folder below /models" in done.stdout


@pytest.fixture
def mounted(docker: str, tmp_path: Path) -> Iterator[list[Path]]:
    """The project with the engines' environment and model mounted."""
    named = os.environ.get("KVROUTER_VLLM_PYTHON")
    if not named:
        pytest.skip("no vLLM environment: set KVROUTER_VLLM_PYTHON, see tests/vllm/make_env.sh")
    python = Path(named)
    install_into(python)
    site = python.parents[1] / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    build = ["build", "-q", "-f", "deploy/Dockerfile.vllm", "--target", "cpu-system", "-t", IMAGE]
    subprocess.run([docker, *build, "."], cwd=ROOT, check=True, timeout=400)
    project: dict[str, Any] = yaml.safe_load(FILE.read_text())
    command = [*project["services"]["prefill-cpu"]["command"], *FLAGS]
    volumes = [f"{site}:/site:ro", f"{model_folder(TINY, python)}:/models:ro"]
    own = {"PYTHONPATH": "/site", "VLLM_CPU_KVCACHE_SPACE": "1"}
    services = {
        name: {
            "image": IMAGE,
            "pull_policy": "never",
            "command": command,
            "environment": {**own, "VLLM_CPU_OMP_THREADS_BIND": core},
            "volumes": volumes,
        }
        for name, core in (("prefill-cpu", "0"), ("decode-cpu", "1"))
    }
    text = yaml.safe_dump({"services": services})
    override = tmp_path / "override.yml"
    override.write_text(text.replace("    image:", "    build: !reset null\n    image:"))
    files = [FILE, override]
    yield files
    done = compose(docker, files, "--profile", "vllm-cpu", "logs", "--tail", "30")
    print(done.stdout[-6000:])
    compose(docker, files, "--profile", "vllm-cpu", "down", "-v", "-t", "5")


def loaded(docker: str, files: list[Path]) -> float:
    """Prompt tokens that the decode engine took from the store."""
    script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/metrics').read())"
    asked = ["exec", "-T", "decode-cpu", "python3", "-c", script]
    text = compose(docker, files, "--profile", "vllm-cpu", *asked).stdout
    return sum(map(float, re.findall(r'source="external_kv_transfer"\} ([\d.e+]+)', text)))


def test_decode_loads_from_the_store_what_prefill_computed(
    docker: str, mounted: list[Path]
) -> None:
    up = ["up", "--build", "--wait", "--wait-timeout", "500"]
    done = compose(docker, mounted, "--profile", "vllm-cpu", *up, STORE_MEMORY="1GiB")
    assert done.returncode == 0, done.stdout[-3000:]
    address = compose(docker, mounted, "port", "router", "8000").stdout.strip()
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://{address}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4
    assert loaded(docker, mounted) > 0
