"""Engines of one rank and of two share latents and heads; what cannot be shared is kept apart."""

import json
from pathlib import Path

import pytest
from tests.vllm.models import TINY, model_folder
from tests.vllm.run_inside import run_inside


@pytest.mark.vllm
@pytest.mark.tested("vllm", "tensor-parallel ranks", "code")
@pytest.mark.timeout(400)
def test_what_is_whole_or_split_by_heads_is_shared_in_the_canonical_layout(
    vllm_python: Path, site: Path | None, store_url: str
) -> None:
    """That the bytes are right too is what tests/vllm/test_walks.py compares."""
    model = model_folder(TINY, vllm_python)
    done = run_inside(vllm_python, [site], "ranks.py", model, store_url)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert "Remove canonical_layout" in told.pop("packed")
    assert {kind for kind, what in told.items() if what == "shared"} == {
        *("latents", "sparse", "draft"),
        *("latents, ranks", "window, ranks"),
    }
    assert told["latents, window, state"] == "apart"
