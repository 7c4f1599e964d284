"""The benchmark of KV events finds the index equal to the truth, or says that it is not."""

import pytest
from benchmarks import kv_events

from kvrouter.prefix.events.tracker import CacheTracker


def test_the_index_is_equal_to_the_truth_after_all_that_goes_wrong() -> None:
    assert kv_events.main(["--blocks", "20000"]) == 0


def test_an_index_that_is_not_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheTracker, "replayed", lambda *answer: None)
    assert kv_events.main(["--blocks", "20000"]) == 1
