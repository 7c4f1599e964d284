"""A forward pass that ends half-way, by vLLM's own code: what it planned to share is not shared."""

import json
from pathlib import Path

import pytest
from tests.vllm.models import TINY, model_folder
from tests.vllm.run_inside import run_inside


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_worker_that_is_told_to_end_amid_a_forward_pass_publishes_none_of_its_blocks(
    vllm_python: Path, site: Path | None, store_url: str
) -> None:
    model = model_folder(TINY, vllm_python)
    done = run_inside(vllm_python, [site], "broken_step.py", model, store_url)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [3, 3, 0]
    assert "the forward pass broke off" in done.stdout
