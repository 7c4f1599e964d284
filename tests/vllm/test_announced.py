"""Requests that are asked before their KV has landed, under vLLM's own scheduler.

Engines without a model (inside/scheduled.py) play it for every kind of cache groups.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.models import TINY, model_folder

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "inside" / "announced.py"
PROMPT_TOKENS, BLOCK = 1290, 64
LOADED = {
    "latents": [20],
    "sparse": [20],
    "latents, window, state": [20, 2, 1],
    "two windows": [20, 2, 5],
    "packed": [20, 2],
    "draft": [19],  # vLLM computes its last block again
}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def played(vllm_python: Path, site: Path | None) -> dict[str, Any]:
    """By kind, what happened to a decode engine."""
    searched = {"PYTHONPATH": ":".join(map(str, filter(None, (site, ROOT))))}
    done = subprocess.run(
        [vllm_python, SCRIPT, model_folder(TINY, vllm_python)],
        env={**os.environ, **searched, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_waiting_request_holds_no_block_and_fetches_what_lands_while_the_rest_is_computed(
    played: dict[str, Any],
) -> None:
    for kind, loaded in LOADED.items():
        landing = played[kind]["landing"]
        assert landing["waited"] == {"held": 0, "computed": 0}, kind
        assert landing["loaded"] == loaded, kind
        assert landing["computed"] == PROMPT_TOKENS - loaded[0] * BLOCK, kind


def test_a_draft_beside_a_window_waits_and_then_computes(played: dict[str, Any]) -> None:
    # VLLM keeps the window's tail at the end, and asks for it a block earlier.
    assert played["draft, window"]["landing"]["computed"] == PROMPT_TOKENS


@pytest.mark.parametrize("ending", ["broken", "late", "orphaned"])
def test_what_is_corrupt_or_late_or_in_a_store_that_dies_is_computed_without_further_waiting(
    played: dict[str, Any], ending: str
) -> None:
    for kind, endings in played.items():
        assert endings[ending]["computed"] == PROMPT_TOKENS, kind


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(
    played: dict[str, Any],
) -> None:
    for kind, endings in played.items():
        assert endings["leaving"]["computed"] == 0, kind
