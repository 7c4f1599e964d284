"""Operations on a node that hangs: the first ones wait, the others fail at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.link import Link
from tests.fakes.store import chain_of, eventually, manifest_of, put_chain

from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.circuit import Circuit, CircuitPass
from kvrouter_store.client.executor import PROBE_S
from kvrouter_store.errors import DeadlineExceeded, StoreUnavailable

MANIFEST = manifest_of(4096)


def test_a_closed_circuit_lets_all_pass() -> None:
    circuit = Circuit()
    assert [circuit.admit(now) for now in (0.0, 0.0, 1.0)] == [CircuitPass.PASS] * 3


def test_an_open_circuit_lets_one_operation_at_a_time_probe() -> None:
    circuit = Circuit()
    circuit.timed_out(10.0)
    assert circuit.admit(10.1) is CircuitPass.REFUSE
    assert circuit.admit(10.3) is CircuitPass.PROBE
    assert circuit.admit(10.3) is CircuitPass.REFUSE
    circuit.probed(10.5, answered=False)
    assert circuit.admit(10.6) is CircuitPass.REFUSE
    assert circuit.admit(11.1) is CircuitPass.PROBE
    circuit.probed(11.1, answered=True)
    assert circuit.admit(11.1) is CircuitPass.PASS


def test_time_outs_of_operations_that_were_on_their_way_do_not_lengthen_the_pause() -> None:
    circuit = Circuit()
    for late in (10.0, 10.05, 10.1):
        circuit.timed_out(late)
    assert circuit.remaining_s(10.1) == pytest.approx(0.15)


@given(st.lists(st.sampled_from(["admit", "timed_out", "answered", "silent", "later"])))
def test_never_two_probes_at_once_and_always_another_one(steps: list[str]) -> None:
    circuit, now, probing = Circuit(), 0.0, False
    for step in steps:
        if step == "admit":
            admission = circuit.admit(now)
            assert (admission is CircuitPass.PASS) == (not circuit.is_open)
            assert not (admission is CircuitPass.PROBE and probing)
            probing = probing or admission is CircuitPass.PROBE
        elif step == "timed_out":
            circuit.timed_out(now)
        elif step == "later":
            now += 0.3
        elif probing:
            circuit.probed(now, answered=step == "answered")
            probing = False
    if circuit.is_open and not probing:
        assert circuit.admit(now + 1.0) is CircuitPass.PROBE


def test_while_a_node_hangs_operations_of_many_threads_fail_at_once(server: StoreServer) -> None:
    with (
        Link(("127.0.0.1", server.port)) as link,
        StoreClient(link.url, transport="tcp", deadline_s=1) as client,
    ):
        put_chain(client, MANIFEST, chain_of(1))
        link.stall()
        with pytest.raises(DeadlineExceeded):
            client.stats()
        ends, waits = time.monotonic() + 2.0, list[float]()
        pause = threading.Event()

        def operate(_: int) -> None:
            while (began := time.monotonic()) < ends:
                with pytest.raises(StoreUnavailable):
                    client.match(MANIFEST, chain_of(1))
                waits.append(time.monotonic() - began)
                pause.wait(0.01)  # as long as an engine computes between two operations

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(operate, range(4)))
        slow = [wait_s for wait_s in waits if wait_s > PROBE_S / 2]
        assert len(waits) > 50
        assert len(slow) <= 4  # one thread probes at a time, with pauses
        assert max(waits) < 1.0
        link.resume()
        assert eventually(lambda: _answers(client))


def _answers(client: StoreClient) -> bool:
    try:
        client.stats()
    except StoreUnavailable:
        return False
    return True
