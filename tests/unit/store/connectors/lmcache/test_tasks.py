"""Tasks end with one result each, and an eventfd that tells of it."""

import os
import select
import threading

import pytest

from kvrouter_store.connectors.lmcache.tasks import Results, Workers


def told(results: Results[str]) -> bool:
    """Whether the eventfd is ready; it is reset."""
    ready, _, _ = select.select([results.fd], [], [], 0)
    if ready:
        os.eventfd_read(results.fd)
    return bool(ready)


def test_a_result_is_told_of_and_taken_once() -> None:
    results: Results[str] = Results()
    assert not told(results)
    results.put(1, "one")
    assert told(results)
    assert results.take(2) is None
    assert results.take(1) == "one"
    assert results.take(1) is None
    results.close()


def test_all_results_are_taken_at_once() -> None:
    results: Results[str] = Results()
    results.put(1, "one")
    results.put(2, "two")
    assert results.take_all() == {1: "one", 2: "two"}
    assert results.take_all() == {}
    results.close()


def test_results_that_nobody_takes_are_dropped_the_oldest_first() -> None:
    results: Results[str] = Results(most=2)
    for task in range(3):
        results.put(task, str(task))
    assert results.take_all() == {1: "1", 2: "2"}
    results.close()


def test_after_the_end_no_result_comes_and_the_eventfd_is_gone() -> None:
    results: Results[str] = Results()
    results.close()
    results.close()
    results.put(1, "one")
    assert results.take(1) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.eventfd_read(results.fd)


def test_more_tasks_than_may_wait_are_refused_until_there_is_room() -> None:
    workers = Workers(1, "test", most=1)
    begun, gate, done = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        gate.wait(10)

    assert workers.submit(slow)
    assert begun.wait(10)
    assert workers.submit(done.set)
    assert not workers.submit(done.set)
    gate.set()
    assert done.wait(10)
    workers.close()


def test_the_end_waits_for_what_runs_and_begins_nothing_more() -> None:
    workers = Workers(1, "test", most=1 << 20)
    begun, gate = threading.Event(), threading.Event()
    ended: list[str] = []

    def slow() -> None:
        begun.set()
        gate.wait(10)
        ended.append("slow")

    workers.submit(slow)
    assert begun.wait(10)
    closing = threading.Thread(target=workers.close)
    closing.start()
    while workers.submit(lambda: ended.append("never")):
        pass  # until the end has come
    gate.set()
    closing.join(10)
    assert not closing.is_alive()
    assert ended == ["slow"]
