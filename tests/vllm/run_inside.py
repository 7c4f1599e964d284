"""Runs scripts of inside/ with the python of the vLLM environment."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_inside(
    python: Path,
    paths: Sequence[Path | None],
    script: str,
    *arguments: object,
    timeout_s: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """Run inside/SCRIPT to its end. `paths` and the checkout go onto its PYTHONPATH."""
    searched = ":".join(str(path) for path in [*paths, ROOT] if path is not None)
    changes: dict[str, Any] = {"PYTHONPATH": searched, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [python, ROOT / "tests" / "vllm" / "inside" / script, *map(str, arguments)],
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
