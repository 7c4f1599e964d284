"""The table of parameters knows every member of vLLM's own request classes, and on its endpoint."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvrouter.engines.families.parameters import VLLM

INSIDE = Path(__file__).parent / "inside"

NOT_OF_ITS_CLASSES = {
    "disaggregated_params",  # TensorRT-LLM
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),  # SGLang
    *("bootstrap_pair_key", "disagg_prefill_dp_rank"),
    *("best_of", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),  # older vLLM
    *("guided_decoding_backend", "guided_whitespace_pattern"),
    *("kv_hint", "kv_hints"),  # Dynamo's, and a member of vLLM's Python API alone (0.32, 0.33)
}


@pytest.fixture(scope="module")
def members(vllm_python: Path) -> dict[str, Any]:
    """Of the classes in the vLLM environment, by endpoint."""
    done = subprocess.run(
        [vllm_python, INSIDE / "parameters.py"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.vllm
@pytest.mark.tested("vllm", "parameters of requests", "code")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_every_member_of_vllms_requests_is_a_row(members: dict[str, Any], kind: Any) -> None:
    known = {name for name, row in VLLM.rows.items() if kind in row.kinds}
    assert set(members[kind]) - known == set()


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_every_row_is_a_member_or_known_to_be_none(members: dict[str, Any]) -> None:
    for kind in ("completion", "chat"):
        rows = {name for name, row in VLLM.rows.items() if kind in row.kinds}
        assert rows - set(members[kind]) - NOT_OF_ITS_CLASSES == set()
