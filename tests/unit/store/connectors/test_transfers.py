"""Transfers that an engine submits and asks about later."""

import threading

import pytest
from tests.fakes.patience import eventually

from kvrouter_store.connectors.transfers import Finished, Transfers


def test_a_transfer_is_told_of_once_when_it_has_ended() -> None:
    transfers: Transfers[str] = Transfers(2, "test", threading.Event())
    gate = threading.Event()
    transfers.submit(1, [lambda: ["first"] if gate.wait(10) else ["late"]])
    assert transfers.take() == []
    gate.set()
    transfers.drain()
    assert [(each.job_id, each.results) for each in transfers.take()] == [(1, ["first"])]
    assert transfers.take() == []
    transfers.close()


def test_the_works_of_a_transfer_run_beside_one_another_and_end_together() -> None:
    transfers: Transfers[int] = Transfers(2, "test", threading.Event())
    both, gate = threading.Barrier(2, timeout=10), threading.Event()

    def first() -> list[int]:
        both.wait()
        return [1]

    def second() -> list[int]:
        both.wait()
        gate.wait(10)
        return [2, 3]

    transfers.submit(5, [first, second])
    transfers.submit(6, [lambda: [4]])  # in the thread that the first one leaves
    done = list[Finished[int]]()

    def took() -> bool:
        done.extend(transfers.take())
        return bool(done)

    assert eventually(took)
    assert [each.job_id for each in done] == [6]
    gate.set()
    transfers.drain()
    assert [(each.job_id, sorted(each.results)) for each in transfers.take()] == [(5, [1, 2, 3])]
    transfers.close()


def test_a_transfer_of_no_work_is_finished_too() -> None:
    news = threading.Event()
    transfers: Transfers[int] = Transfers(1, "test", news)
    transfers.submit(3, [])
    assert news.wait(10)
    assert [(each.job_id, each.results) for each in transfers.take()] == [(3, [])]
    transfers.close()


def test_what_raises_has_no_results_is_logged_and_keeps_those_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transfers: Transfers[float] = Transfers(1, "test", threading.Event())
    transfers.submit(7, [lambda: [1 / 0], lambda: [2.0]])
    transfers.drain()
    assert [(each.job_id, each.results) for each in transfers.take()] == [(7, [2.0])]
    transfers.close()
    assert "ZeroDivisionError" in caplog.text


def test_each_transfer_is_finished_at_the_end_whether_it_had_begun_or_not() -> None:
    transfers: Transfers[int] = Transfers(1, "test", threading.Event())
    begun, gate = threading.Event(), threading.Event()

    def slow() -> list[int]:
        begun.set()
        gate.wait(10)
        return [1]

    transfers.submit(1, [slow])
    transfers.submit(2, [lambda: [2], lambda: [3]])
    assert begun.wait(10)
    closing = threading.Thread(target=transfers.close)
    closing.start()
    gate.set()
    closing.join(10)
    assert not closing.is_alive()
    results = {each.job_id: each.results for each in transfers.take()}
    assert results[1] == [1]
    assert results[2] in ([], [2], [2, 3])  # begun before the end came, or not


def test_a_drain_waits_for_all_that_was_submitted() -> None:
    transfers: Transfers[int] = Transfers(3, "test", threading.Event())
    for job in range(50):
        transfers.submit(job, [lambda: [0]])
    transfers.drain()
    assert sorted(each.job_id for each in transfers.take()) == list(range(50))
    transfers.close()
