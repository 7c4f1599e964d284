"""A forward pass that ends half-way, by vLLM's own code: what it planned to share is not shared."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.vllm.models import TINY, model_folder

from kvrouter_store._core import StoreServer

ROOT = Path(__file__).parents[2]
INSIDE = Path(__file__).parent / "inside"


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_worker_that_is_told_to_end_amid_a_forward_pass_publishes_none_of_its_blocks(
    vllm_python: Path, site: Path | None
) -> None:
    node = StoreServer(pool_bytes=16 << 20)
    node.start()
    model = model_folder(TINY, vllm_python)
    searched = {"PYTHONPATH": ":".join(map(str, filter(None, (site, ROOT))))}
    try:
        done = subprocess.run(
            [vllm_python, INSIDE / "broken_step.py", model, f"kv://127.0.0.1:{node.port}"],
            env={**os.environ, **searched, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        node.stop()
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [3, 3, 0]
    assert "the forward pass broke off" in done.stdout
