"""An answer goes to the store a few blocks at a time: each put of one delays all other streams."""

import json
from pathlib import Path

import pytest
from tests.vllm.models import TINY, model_folder
from tests.vllm.run_inside import run_inside


@pytest.mark.vllm
@pytest.mark.timeout(200)
def test_the_blocks_of_an_answer_are_put_in_batches_and_all_of_them_when_it_ends(
    vllm_python: Path, site: Path | None, store_url: str
) -> None:
    """Where a window moves on, older blocks are gone by then: each is put when it is complete."""
    model = model_folder(TINY, vllm_python)
    done = run_inside(vllm_python, [site], "answers.py", model, store_url)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "latents": [[1, 2, 2, 2, 2, 2], 11],
        "two windows": [[3, *[1] * 10], 1],
    }
