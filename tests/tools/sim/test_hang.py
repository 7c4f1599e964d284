"""A core that hangs behind a server that answers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.tools.sim.conftest import LiveSim


def test_a_core_that_hangs_computes_nothing_while_its_server_answers(
    live_sim: Callable[..., LiveSim],
) -> None:
    sim = live_sim()
    core = sim.server.engine.core
    sim.call(core.clear)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(sim.text, [1, 2, 3], 4)
        while not sim.metric("vllm:num_requests_running"):
            assert sim.ask("GET", "/health")[0] == 200
        assert sim.metric("vllm:generation_tokens_total") == 0
        assert not answer.done()
        sim.call(core.set)
        assert answer.result(20)
    assert sim.metric("vllm:generation_tokens_total") == 4
