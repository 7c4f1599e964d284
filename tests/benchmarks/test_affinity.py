"""The affinity benchmark on small traces."""

import json
from pathlib import Path

import pytest
from benchmarks import affinity
from benchmarks.eviction import Request
from tests.benchmarks.test_eviction import SESSIONS, TURNS, write_trace

ALL = 2 * sum(range(1, TURNS + 1)) * SESSIONS  # blocks that are asked for
NEW = 2 * TURNS * SESSIONS


def sessions() -> list[Request]:
    """The trace of `write_trace`: a turn every second, each two blocks longer."""
    return [
        (float(turn * SESSIONS + session), [1000 * session + at for at in range(2 * turn + 2)])
        for turn in range(TURNS)
        for session in range(SESSIONS)
    ]


def test_engines_that_hold_all_find_all_but_the_new_blocks_by_either_way() -> None:
    found = affinity.measure("a", sessions(), 4, 10_000).found
    assert found["exact"] == found["learnt"] == pytest.approx(1 - NEW / ALL)
    assert found["blind"] < found["learnt"]


def test_engines_that_hold_nothing_find_nothing() -> None:
    assert set(affinity.measure("a", sessions(), 4, 1).found.values()) == {0.0}


def test_what_leaves_a_cache_is_the_end_of_what_was_not_used_longest() -> None:
    cache = affinity.Cache(4)
    assert cache.use([1, 2]) == []
    assert cache.use([5, 6, 7]) == [2]
    assert (cache.leading([1, 2]), cache.leading([5, 6, 7, 8])) == (1, 3)


def test_it_prints_each_fleet_and_judges_each_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, cells = tmp_path / "trace.jsonl.gz", tmp_path / "cells.json"
    write_trace(trace)
    monkeypatch.setattr("sys.argv", ["affinity", str(trace), "--json", str(cells)])
    assert affinity.main() == 0
    assert len(json.loads(cells.read_bytes())) == len(affinity.FLEETS)
    assert "trace.jsonl.gz: learnt to exact" in capsys.readouterr().out
