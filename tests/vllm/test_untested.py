"""A newer vLLM than was tested starts where that is allowed, after a self-test that can fail."""

import json
from pathlib import Path

import pytest
from tests.vllm.models import TINY, model_folder
from tests.vllm.run_inside import run_inside


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_an_engine_that_was_not_tested_starts_if_allowed_and_if_its_self_test_passes(
    vllm_python: Path, site: Path | None, store_url: str
) -> None:
    model = model_folder(TINY, vllm_python)
    done = run_inside(vllm_python, [site], "untested.py", model, store_url)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not [kind for kind, told in found.items() if told["allowed"]]
    told = found["latents"]
    assert not [each for each in told.values() if "LEAVES" in each]
    assert '"allow_untested": true' in told["not allowed"]
    assert "names blocks in another way" in told["names"]
    assert "group 0 did not come back from the host memory" in told["copies"]
    assert "did not come back from the store" in told["store"]
