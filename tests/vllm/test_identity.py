"""Who shares with whom, by vLLM's real configuration and cache classes."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.models import TINY, model_folder

from kvrouter_store.identity.weights import weights_digest

INSIDE = Path(__file__).parent / "inside"


@pytest.fixture(scope="module")
def found(vllm_python: Path, site: Path | None) -> dict[str, Any]:
    """What inside/identities.py finds in the vLLM environment."""
    tiny = model_folder(TINY, vllm_python)
    other = model_folder(replace(TINY, seed=TINY.seed + 1), vllm_python)
    paths = {"PYTHONPATH": str(site)} if site else {}
    done = subprocess.run(
        [vllm_python, INSIDE / "identities.py", tiny, other],
        env={**os.environ, **paths, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.vllm
@pytest.mark.tested("vllm", "who may share KV", "code")
@pytest.mark.timeout(400)
def test_engines_share_only_where_everything_agrees(found: dict[str, Any]) -> None:
    digests = found["digests"]
    assert digests.pop("same") == digests["base"]
    every = [digest for manifests in digests.values() for digest in manifests]
    assert len(set(every)) == len(every)


@pytest.mark.vllm
def test_other_numbers_of_ranks_share_in_the_canonical_layout_alone(found: dict[str, Any]) -> None:
    ranks = found["ranks"]
    assert ranks["1 canonical"] == ranks["2 canonical"]
    assert len({str(each) for each in ranks.values()}) == 3


@pytest.mark.vllm
def test_vllms_defaults_but_for_the_flags_named_may_start(found: dict[str, Any]) -> None:
    start = found["start"]
    assert start["defaults"] == ""
    assert "--prefix-caching-hash-algo sha256_cbor" in start["hash"]
    assert "--enable-prefix-caching" in start["no prefix caching"]
    assert "what follows it" in start["not causal"]


@pytest.mark.vllm
def test_the_connector_is_the_interface_that_vllm_calls(found: dict[str, Any]) -> None:
    assert all(found["interface"].values()), found["interface"]


def test_weights_are_named_by_their_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "README.md").write_text(folder.name)
    assert weights_digest(first) == weights_digest(second) != ""
    (second / "model.safetensors").write_bytes(b"weightz")
    assert weights_digest(first) != weights_digest(second)
    assert weights_digest(tmp_path) == ""
