"""The connector under vLLM's own scheduler, over cache groups that no CPU backend computes.

Engines without a model (inside/scheduled.py) walk at random beside a store that dies, hangs, evicts
and decays, while clients leave and caches are reset (inside/walks.py). They load from the store's
own memory, at once or late, or by way of vLLM's; from one node, or from a second one that a hint
names. Every byte that attention would read is compared.
KVROUTER_WALK_STEPS: steps of each walk.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.vllm.compatibility import SCHEDULER, note
from tests.vllm.models import TINY, model_folder
from tests.vllm.run_inside import run_inside

MAKE_NEXT = Path(__file__).parent / "make_next.sh"
STEPS = int(os.environ.get("KVROUTER_WALK_STEPS", "1000"))
ROWS = {
    "latents": "MLA",
    "sparse": "MLA, sparse",
    "latents, window, state": "MLA, sliding window, state",
    "two windows": "full, two sliding windows",
    "packed": "MLA, sliding window, packed",
    "draft": "MLA, draft layers",
    "draft, window": "MLA, draft layers",
}
"""What the kinds of groups are called in the documentation."""
SEED = os.environ.get("KVROUTER_WALK_SEED", "1")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(200 + STEPS),
    pytest.mark.tested("vllm", "kinds of cache groups", "code"),
    pytest.mark.tested("vllm", "tensor-parallel ranks", "code"),
    pytest.mark.tested("next vllm", "kinds of cache groups", "code"),
    pytest.mark.tested("next vllm", "tensor-parallel ranks", "code"),
]


@pytest.fixture(scope="module")
def next_vllm(vllm_python: Path) -> Path:
    """The Python code of a newer vLLM, for PYTHONPATH."""
    made = subprocess.check_output([MAKE_NEXT, vllm_python], text=True, timeout=900)
    return Path(made.splitlines()[-1])


def walk(
    python: Path,
    paths: Sequence[Path | None],
    steps: int,
    *kinds: str,
    road: str,
    verify: bool = True,
) -> subprocess.CompletedProcess[str]:
    words = model_folder(TINY, python), steps, SEED, int(verify), road, *kinds
    return run_inside(python, paths, "walks.py", *words, timeout_s=100 + STEPS)


def check(done: subprocess.CompletedProcess[str], series: str, road: str) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    walked = json.loads(done.stdout.splitlines()[-1])
    assert walked
    found = []
    for kind, seen in walked.items():
        print(f"{kind}: {seen}")
        for group in range(seen["groups"]):
            assert seen[f"blocks loaded of group {group}"] > 0, kind
        maps = not road.endswith("away")
        assert (seen.get("loads from the store's memory", 0) > 0) == maps, kind
        found.append(seen.get("blocks of the other node", 0) > 0)
        if kind in ROWS:
            note(ROWS[kind], series, SCHEDULER)
    # Where stores are away for long, a kind may meet none by chance.
    assert all(found) if road == "hosts" else any(found) == road.startswith("hosts")


@pytest.mark.parametrize("road", ["here", "late", "away", "hosts", "hosts-away"])
def test_whatever_happens_attention_reads_what_was_computed_and_nothing_stays_held(
    vllm_python: Path, site: Path | None, road: str
) -> None:
    check(walk(vllm_python, [site], STEPS, road=road), "0.32", road)


@pytest.mark.parametrize("road", ["here", "hosts"])
def test_the_same_holds_for_the_code_of_a_vllm_that_has_no_cpu_build(
    vllm_python: Path, site: Path | None, next_vllm: Path, road: str
) -> None:
    check(walk(vllm_python, [next_vllm, site], STEPS, road=road), "0.33", road)


@pytest.mark.parametrize("road", ["here", "away"])
def test_a_walk_of_engines_that_do_not_verify_finds_a_store_that_decays(
    vllm_python: Path, site: Path | None, road: str
) -> None:
    done = walk(vllm_python, [site], 20 * STEPS, "two windows", road=road, verify=False)
    assert done.returncode != 0
    assert "assert torch.equal(page, expected)" in done.stderr, done.stderr[-3000:]
