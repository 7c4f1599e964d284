"""The README's commands for vLLM, as they stand there, on a small model and free ports."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.vllm.engines import OFFLINE, READY_DEADLINE_S, ask, free_port
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service

README = Path(__file__).parents[2] / "README.md"
PORTS = ("7400", "8101", "8102", "8000")
SMALL = "--dtype float32 --enforce-eager --max-model-len 4096"  # this is a small machine
PROMPT = list(range(100, 900))

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def commands(vllm_python: Path) -> tuple[str, list[str], dict[str, str]]:
    """The engines' common command, the commands, and the port in the place of each port."""
    block = README.read_text().partition("**With vLLM**")[2].partition("```console\n")[2]
    text = block.partition("```")[0]
    ports = {port: str(free_port()) for port in PORTS}
    for port, free in ports.items():
        text = re.sub(rf"\b{port}\b", free, text)
    text = text.replace("MODEL", f"{model_folder(TINY, vllm_python)} {SMALL}")
    text = text.replace("--memory 8GiB", f"--memory 1GiB --port {ports['7400']}")
    store, engine, *rest = [each.strip() for each in re.split(r"^\$ ", text, flags=re.M)[1:]]
    return engine, [store, *rest], ports


def loaded(port: str) -> float:
    """Prompt tokens that an engine took from the store."""
    text = ask(f"127.0.0.1:{port}", "GET", "/metrics", None, 10.0)[1].decode()
    return sum(map(float, re.findall(r'source="external_kv_transfer"\} ([\d.e+]+)', text)))


def test_engines_started_as_the_readme_says_share_kv_and_the_doctor_finds_nothing(
    commands: tuple[str, list[str], dict[str, str]],
    vllm_python: Path,
    site: Path | None,
    tmp_path: Path,
) -> None:
    common, (store, prefill, decode, doctor, router), ports = commands
    paths = [vllm_python.parent, Path(sys.executable).parent, os.environ["PATH"]]
    engine = [f"PATH={':'.join(map(str, paths))}", "VLLM_CPU_KVCACHE_SPACE=1"]
    engine += [f"{name}={value}" for name, value in OFFLINE.items()]
    engine += [f"PYTHONPATH={site}"] if site is not None else []
    own = [f"PATH={':'.join(map(str, paths[1:]))}"]
    with ExitStack() as cleanup:

        def start(name: str, port: str, words: list[str], command: str) -> Service:
            service = Service.start(name, ["env", *words, "bash", "-c", command], tmp_path)
            cleanup.callback(service.stop)
            service.address = f"127.0.0.1:{ports[port]}"
            return service

        start("store", "7400", own, f"exec {store}").wait_port(int(ports["7400"]))
        engines = [
            start(f"engine-{core}", port, [*engine, bound], f"{common}; exec {command}")
            for core, port, command in (("0", "8101", prefill), ("1", "8102", decode))
            for bound in [f"VLLM_CPU_OMP_THREADS_BIND={core}"]
        ]
        for each in engines:
            each.wait_http(each.address, "/health", READY_DEADLINE_S)
        found = subprocess.run(
            ["env", *own, "bash", "-c", doctor],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        print(found.stdout)
        assert found.returncode == 0, found.stdout
        assert found.stdout.count("shares full_attention, group 0: a hit needs all blocks") == 2
        serving = start("router", "8000", own, f"exec {router} --port {ports['8000']}")
        serving.wait_http(serving.address, "/health")
        before = loaded(ports["8102"])
        body = {"model": str(model_folder(TINY, vllm_python)), "prompt": PROMPT, "max_tokens": 4}
        assert ask(serving.address, "POST", "/v1/completions", body, 60.0)[0] == 200
        assert loaded(ports["8102"]) > before
