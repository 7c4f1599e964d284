"""Engines that are killed amid puts and loads harm no other: their bytes, leases and files."""

import json
import os
from pathlib import Path

import pytest
from tests.vllm.models import TINY, model_folder
from tests.vllm.run_inside import run_inside

KILLS = int(os.environ.get("KVROUTER_KILLS", "50"))


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_what_killed_engines_put_and_held_is_right_and_given_back(
    vllm_python: Path, site: Path | None
) -> None:
    """One engine beside them compares every byte that it loads of what they put."""
    model = model_folder(TINY, vllm_python)
    words = "killed_engines.py", model, KILLS
    done = run_inside(vllm_python, [site], *words, timeout_s=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found.pop("loaded") > 10 * KILLS
    assert found.pop("compared") > 0
    assert found.pop("kills") == KILLS
    assert not any(found.values()), found
