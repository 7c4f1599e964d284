"""The eviction benchmark on a small trace: the real program, compiled and run."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from benchmarks import eviction

from kvrouter_store._core import EVICTION_POLICIES

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (c++)")
SESSIONS, TURNS = 30, 8


def write_trace(path: Path) -> None:
    """Sessions in turn; each turn asks for all before it and two blocks more."""
    with gzip.open(path, "wt") as out:
        for turn in range(TURNS):
            for session in range(SESSIONS):
                names = [1000 * session + block for block in range(2 * turn + 2)]
                at_ms = 1000 * (turn * SESSIONS + session)
                out.write(json.dumps({"timestamp": at_ms, "hash_ids": names}) + "\n")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eviction.compile_replay(tmp_path_factory.mktemp("eviction"))


def test_a_pool_that_holds_all_hits_all_but_the_new_blocks(program: Path, tmp_path: Path) -> None:
    trace, binary = tmp_path / "trace.jsonl.gz", tmp_path / "trace"
    write_trace(trace)
    eviction.write_binary(eviction.read_requests(trace), binary)
    for policy in (*EVICTION_POLICIES, eviction.OPTIMUM):
        counts = eviction.replay(program, binary, policy, 2 * TURNS * SESSIONS)
        assert counts["requests"] == SESSIONS * TURNS
        assert counts["distinct"] == 2 * TURNS * SESSIONS
        assert counts["asked"] - counts["hits"] == counts["distinct"]


def test_nothing_beats_the_optimum_and_a_short_pool_hits_less(
    program: Path, tmp_path: Path
) -> None:
    trace, binary = tmp_path / "trace.jsonl.gz", tmp_path / "trace"
    write_trace(trace)
    eviction.write_binary(eviction.read_requests(trace), binary)
    hits = {
        policy: eviction.replay(program, binary, policy, 100)["hits"]
        for policy in (*EVICTION_POLICIES, eviction.OPTIMUM)
    }
    most = eviction.replay(program, binary, eviction.OPTIMUM, 2 * TURNS * SESSIONS)["hits"]
    assert max(hits.values()) == hits[eviction.OPTIMUM] < most


def test_the_judge_compares_with_the_other_policy_and_the_optimum() -> None:
    shares = {"density": 0.5, "lru": 0.4, "min": 0.9}
    cells = [eviction.Cell("t", 1, 10, policy, hit, hit) for policy, hit in shares.items()]
    lead, closed = eviction.judge(cells, "token_hits")
    assert lead == pytest.approx(0.1)
    assert closed == pytest.approx(0.2)
