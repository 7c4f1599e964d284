"""Queues of models with a limit of their own, as the limits change."""

from kvrouter.admission.queue import Turn, Waiting, Work
from kvrouter.admission.tenants import Tenants
from kvrouter.admission.waiting import ModelGates, QueueWait
from kvrouter.telemetry.metrics import Metrics


def make_gates(**limits: int) -> tuple[QueueWait, ModelGates]:
    fleet = QueueWait(100, 5, timeout_s=60.0, tenants=Tenants("x-tenant"), metrics=Metrics())
    return fleet, ModelGates(fleet, limits)


def join(gate: QueueWait) -> Waiting:
    waiting = gate.join("t", 0, Work(1, 1), lambda: None)
    assert waiting is not None
    return waiting


def test_a_request_passes_the_gate_of_its_alias_and_then_that_of_its_model() -> None:
    _, gates = make_gates(a=1, chat=2)
    assert [gate.limit for gate in gates.of("a", "chat")] == [2, 1]
    assert [gate.limit for gate in gates.of("a", "a")] == [1]
    assert [gate.limit for gate in gates.of("b", "chat")] == [2]
    assert gates.of("b", None) == []
    assert (len(gates), len(make_gates()[1])) == (2, 0)


def test_a_new_limit_holds_for_those_who_come_and_those_who_wait() -> None:
    _, gates = make_gates(a=1)
    (gate,) = gates.of("a", None)
    assert gate.enter()
    waiting = join(gate)
    assert gates.waiting == 1
    gates.follow({"a": 2, "b": 1})
    assert gates.of("a", None) == [gate]
    assert waiting.turn is Turn.ADMITTED
    assert not gate.enter()
    assert len(gates) == 2


def test_without_its_limit_a_model_keeps_nobody_waiting() -> None:
    _, gates = make_gates(a=1)
    (gate,) = gates.of("a", None)
    assert gate.enter()
    waiting = [join(gate) for _ in range(3)]
    gates.follow({})
    assert {each.turn for each in waiting} == {Turn.ADMITTED}
    for _ in range(4):
        gate.leave()
    assert gate.requests == 0
    gates.follow({"a": 1})
    assert gates.of("a", None)[0].enter()


def test_the_gates_have_the_settings_of_the_fleets_queue() -> None:
    fleet, gates = make_gates(a=1)
    (gate,) = gates.of("a", None)
    assert (gate.queue_size, gate.timeout_s) == (5, 60.0)
    fleet.resize(100, 7)
    fleet.timeout_s = 9.0
    gates.follow({"a": 1})
    assert (gate.queue_size, gate.timeout_s, gate.limit) == (7, 9.0, 1)
