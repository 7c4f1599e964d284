"""Copies between shapes beside torch, which the engines' environment has."""

import json
import os
import subprocess
from pathlib import Path

import pytest

INSIDE = Path(__file__).parent / "inside"
PAIRS = int(os.environ.get("KVROUTER_SHAPE_PAIRS", "500"))


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_copies_between_random_shapes_are_what_torch_makes_of_them(
    vllm_python: Path, site: Path | None
) -> None:
    done = subprocess.run(
        [vllm_python, INSIDE / "shapes.py", str(PAIRS)],
        env={**os.environ, **({"PYTHONPATH": str(site)} if site else {})},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kinds = json.loads(done.stdout.splitlines()[-1])
    print(f"{PAIRS} pairs beside torch, none different: {kinds}")
    assert sum(kinds.values()) == PAIRS
