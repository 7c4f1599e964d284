"""`kvrouter bench serve` beside `vllm bench serve`: one router, one load, the same figures."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.vllm.engines import OFFLINE
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
LOAD = (
    *("--model", "tiny", "--random-input-len", "64", "--random-output-len", "20"),
    *("--num-prompts", "40"),
    *("--max-concurrency", "4", "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el"),
)
THEIRS = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
TIMES = ("Median TTFT (ms):", "Mean TPOT (ms):", "Median ITL (ms):")
"""Not the mean TTFT: a single late answer on a busy machine decides it."""


def rows(command: list[str]) -> dict[str, float]:
    """The rows of the block that a benchmark prints."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=OFFLINE, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    block = done.stdout[done.stdout.index("= Serving Benchmark Result =") :]
    lines = [line for line in block.splitlines() if ":  " in line]
    return {line[:40].strip(): float(line[40:]) for line in lines}


def test_its_figures_are_those_of_vllms_own_benchmark(
    vllm_python: Path, simulated: Service
) -> None:
    url = ("--base-url", simulated.url)
    tokenizer = str(model_folder(TINY, vllm_python))
    how = ("--backend", "openai", "--dataset-name", "random", "--tokenizer", tokenizer)
    theirs = rows([str(vllm_python), "-c", THEIRS, *LOAD, *how, "--disable-tqdm", *url])
    ours = rows([sys.executable, "-m", "kvrouter", "bench", "serve", *LOAD, *url])
    print({name: (theirs[name], ours[name]) for name in TIMES})
    legs = {name for name in ours if name not in theirs}
    assert theirs.keys() <= ours.keys()
    assert "Mean prefill leg (ms):" in legs
    for name in ("Successful requests:", "Failed requests:", "Total generated tokens:"):
        assert ours[name] == theirs[name]
    for name in TIMES:
        assert ours[name] == pytest.approx(theirs[name], rel=0.3)
