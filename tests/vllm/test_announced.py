"""Requests that are asked before their KV has landed, under vLLM's own scheduler.

Engines without a model (inside/scheduled.py) play it for every kind of cache groups.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.models import TINY, model_folder
from tests.vllm.run_inside import run_inside

PROMPT_TOKENS, BLOCK = 1290, 64
FIRST_TOKENS = 3 * 256  # what the prefill engine computes before it stops, in that story
LOADED = {
    "latents": [20],
    "sparse": [20],
    "latents, window, state": [20, 2, 1],
    "two windows": [20, 2, 5],
    "packed": [20, 2],
    "draft": [19],  # vLLM computes its last block again
}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", params=["here", "away"])
def played(
    request: pytest.FixtureRequest,
    vllm_python: Path,
    site: Path | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """By kind, what happened to a decode engine: with a store whose memory it can map, and not."""
    words: list[object] = [model_folder(TINY, vllm_python)]
    if request.param == "here":
        words.append(tmp_path_factory.mktemp("announced") / "store")
    done = run_inside(vllm_python, [site], "announced.py", *words)
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


def test_a_request_whose_first_pieces_are_corrupt_does_not_wait_for_the_rest(
    played: dict[str, Any],
) -> None:
    for kind, endings in played.items():
        if "broken" not in endings:
            continue
        # What was put after the pool was overwritten can be used.
        computed = endings["broken"]["computed"]
        assert PROMPT_TOKENS - FIRST_TOKENS <= computed <= PROMPT_TOKENS, kind


@pytest.mark.parametrize("ending", ["late", "orphaned"])
def test_what_does_not_come_in_time_or_from_a_store_that_dies_is_computed(
    played: dict[str, Any], ending: str
) -> None:
    for kind, endings in played.items():
        assert endings[ending]["computed"] == PROMPT_TOKENS, kind


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(
    played: dict[str, Any],
) -> None:
    for kind, endings in played.items():
        assert endings["leaving"]["computed"] == 0, kind
