"""guidellm, unchanged, against the router over simulated engines: it counts what they said."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import OFFLINE
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service

from kvrouter.tools.sim.kv_bytes import Oracle
from kvrouter.tools.sim.settings import SimSettings

REQUESTS, OUTPUT_TOKENS = 24, 20
PATHS = ("/v1/completions", "/v1/chat/completions")
Report = dict[str, list[dict[str, Any]]]
MAKE = Path(__file__).with_name("make_guidellm.sh")
MAKE_S, RUN_S = 500, 150
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(MAKE_S + RUN_S)]


@pytest.fixture(scope="module")
def guidellm(vllm_python: Path) -> Path:
    """The command; its environment is made where it is not there yet."""
    try:
        made = subprocess.run(
            [MAKE, vllm_python], capture_output=True, text=True, timeout=MAKE_S, check=True
        )
    except subprocess.CalledProcessError as failed:
        why = failed.stderr.strip().splitlines()[-1:]
        pytest.skip(f"guidellm cannot be installed ({why}): run with tests/vllm/make_guidellm.sh")
    return Path(made.stdout.strip()).with_name("guidellm")


@pytest.fixture(scope="module")
def reports(
    guidellm: Path, vllm_python: Path, simulated: Service, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Report]:
    """What it reports of each path; at the same time, for most of it is imports."""
    tokenizer = model_folder(TINY, vllm_python)

    def judged(path: str) -> Report:
        return judge(guidellm, simulated.url, path, tokenizer, tmp_path_factory.mktemp("guidellm"))

    with ThreadPoolExecutor(len(PATHS)) as pool:
        return dict(zip(PATHS, pool.map(judged, PATHS), strict=True))


def judge(guidellm: Path, url: str, path: str, tokenizer: Path, folder: Path) -> Report:
    """Its report on requests of about 64 tokens, streamed, four at a time."""
    report = folder / "report.json"
    backend = f"kind=openai_http,target={url},model=tiny,request_format={path}"
    data = f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}"
    done = subprocess.run(
        [
            *(guidellm, "run", "--backend", backend, "--data", data),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
            *("--output", f"kind=json,path={report}", "--disable-console"),
        ],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env={**OFFLINE, "HOME": str(folder), "GUIDELLM__MAX_WORKER_PROCESSES": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    found: Report = benchmark["requests"]
    return found


@pytest.mark.parametrize("path", PATHS)
def test_it_counts_every_request_as_good_and_the_tokens_as_they_are(
    reports: dict[str, Report], path: str
) -> None:
    requests = reports[path]
    assert requests["errored"] == requests["incomplete"] == []
    assert len(requests["successful"]) == REQUESTS
    sim = SimSettings(model="tiny", block_size=16)
    oracle = Oracle(sim.manifest)
    for request in requests["successful"]:
        arguments = json.loads(request["request_args"])
        body = arguments["body"]
        assert arguments["stream"] is body["stream"] is True
        if "messages" in body:
            prompt = oracle.tokenizer.render_chat(body["messages"])
        else:
            prompt = oracle.tokenizer.encode(body["prompt"])
        assert request["prompt_tokens"] == len(prompt)
        assert request["output_tokens"] == OUTPUT_TOKENS
        assert request["output"] == oracle.text(prompt, OUTPUT_TOKENS)
        assert 0 < request["time_to_first_token_ms"] < 1000 * request["request_latency"]
