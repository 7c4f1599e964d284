"""Where host memory has no room for all that wait at once, they load in turn."""

import json
from pathlib import Path

import pytest
from tests.vllm.models import TINY, model_folder
from tests.vllm.run_inside import run_inside


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_hits_that_need_many_times_the_host_memory_are_loaded_and_longer_prompts_in_part(
    vllm_python: Path, site: Path | None, store_url: str
) -> None:
    """Every byte that is read is compared (inside/scheduled.py)."""
    model = model_folder(TINY, vllm_python)
    done = run_inside(vllm_python, [site], "small_memory.py", model, store_url)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert not [name for name, blocks in found.items() if blocks is None]
    assert found["latents, 8 chunks, 1 prompts"] == [8]
    assert found["latents, 40 chunks, 1 prompts"] == [12]
    assert found["two windows, 40 chunks, 1 prompts"] == [12, 2, 5]
    assert found["latents, window, state, 40 chunks, 1 prompts"] == [12, 2, 1]
    assert found["latents, 20 chunks, 8 prompts"] == [96]
    assert found["two windows, 20 chunks, 8 prompts"] == [96, 16, 40]
    assert found["latents, window, state, 20 chunks, 8 prompts"] == [96, 16, 8]
