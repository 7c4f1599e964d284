"""A simulated engine without a store: its own cache, its queue, its clock, its failures."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq
from tests.tools.sim.conftest import DEADLINE_S, LiveSim

from kvrouter.tools.sim.engine import SimEngine
from kvrouter.tools.sim.requests import parse_request
from kvrouter.tools.sim.settings import SimSettings

Start = Callable[..., LiveSim]
PROMPT = list(range(100, 200))


def test_the_same_prompt_gives_the_same_text_from_any_engine(live_sim: Start) -> None:
    one, other = live_sim(), live_sim()
    text = one.text(PROMPT, 40)
    assert one.text(PROMPT, 40) == text
    assert other.text(PROMPT, 40) == text
    assert other.text(PROMPT[1:], 40) != text


def test_another_seed_of_the_hashes_is_another_model_of_the_world(live_sim: Start) -> None:
    assert live_sim().text(PROMPT, 20) != live_sim(hash_seed="7").text(PROMPT, 20)


def test_an_answer_goes_on_as_if_it_had_been_part_of_the_prompt(live_sim: Start) -> None:
    sim = live_sim()
    whole = sim.complete(PROMPT, 40, return_token_ids=True)["choices"][0]["token_ids"]
    rest = sim.complete(PROMPT + whole[:25], 15, return_token_ids=True)["choices"][0]["token_ids"]
    assert rest == whole[25:]


def test_a_repeated_prompt_comes_from_the_engines_own_cache(live_sim: Start) -> None:
    sim = live_sim()
    sim.complete(PROMPT)
    usage = sim.complete(PROMPT)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 96
    assert sim.tokens_from("local_cache_hit") == 96
    assert sim.tokens_from("local_compute") == len(PROMPT) + len(PROMPT) - 96


def test_a_prompt_of_whole_blocks_still_computes_its_last_one(live_sim: Start) -> None:
    sim = live_sim()
    sim.complete(PROMPT[:32])
    assert sim.complete(PROMPT[:32])["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


def test_a_salt_keeps_prompts_apart(live_sim: Start) -> None:
    sim = live_sim()
    sim.complete(PROMPT)
    salted = sim.complete(PROMPT, cache_salt="x")["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0
    again = sim.complete(PROMPT, cache_salt="x")["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == 96


def test_a_reset_cache_remembers_nothing(live_sim: Start) -> None:
    sim = live_sim()
    sim.complete(PROMPT)
    assert sim.ask("POST", "/reset_prefix_cache")[0] == 200
    assert sim.complete(PROMPT)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_small_cache_forgets_the_oldest_prompt(live_sim: Start) -> None:
    sim = live_sim(kv_cache_size=8, max_model_len=128)
    for first in (0, 1000, 2000):
        sim.complete(list(range(first, first + 64)), 1)
    cached = sim.complete(list(range(64)), 1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 0


def test_the_first_token_takes_the_time_that_the_flag_says(live_sim: Start) -> None:
    sim = live_sim(time_to_first_token="150ms", inter_token_latency="10ms")
    began = time.monotonic()
    sim.complete(PROMPT, 6)
    assert time.monotonic() - began >= 0.2
    assert sim.metric("vllm:time_to_first_token_seconds_sum") >= 0.15
    assert sim.metric("vllm:inter_token_latency_seconds_sum") >= 0.045


def test_computed_tokens_take_time_and_cached_ones_do_not(live_sim: Start) -> None:
    sim = live_sim(prefill_time_per_token="2ms")
    sim.complete(PROMPT, 1)
    cold = sim.metric("vllm:time_to_first_token_seconds_sum")
    sim.complete(PROMPT, 1)
    warm = sim.metric("vllm:time_to_first_token_seconds_sum") - cold
    assert cold >= 0.2
    assert warm < 0.1


def test_requests_beyond_the_limit_wait_and_beyond_the_queue_are_answered_429(
    live_sim: Start,
) -> None:
    sim = live_sim(max_num_seqs=1, max_waiting_queue_length=1, time_to_first_token="1s")
    body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(sim.ask("POST", "/v1/completions", body)[0]))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200, 200, 429]
    assert sim.metric("vllm:request_queue_time_seconds_sum") > 0.5


def test_a_client_that_leaves_frees_its_slots_at_once(live_sim: Start) -> None:
    sim = live_sim(inter_token_latency="50ms")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 500, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", sim.port)) as client:
        client.sendall(head.encode() + body)
        assert b"200 OK" in client.recv(4096)
        assert sim.metric("vllm:num_requests_running") == 1
    deadline = time.monotonic() + 5
    while sim.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        pass
    assert sim.metric("vllm:num_requests_running") == 0
    assert sim.metric("vllm:kv_cache_usage_perc") == 0
    assert sim.metric("vllm:request_success_total", finished_reason="abort") == 1


def test_injected_failures_are_answered_and_counted(live_sim: Start) -> None:
    sim = live_sim(failure_injection_rate=100, failure_types=["rate_limit"])
    status, body = sim.ask("POST", "/v1/completions", b'{"prompt": "hello"}')
    assert status == 429
    assert json.loads(body)["error"]["code"] == 429
    assert sim.metric("kvsim:injected_failures_total") == 1
    assert sim.ask("GET", "/health")[0] == 200


def test_it_is_called_by_every_served_name(live_sim: Start) -> None:
    sim = live_sim(served_model_name=["small", "smaller"])
    _, listed = sim.ask("GET", "/v1/models")
    assert [card["id"] for card in json.loads(listed)["data"]] == ["small", "smaller"]
    assert sim.complete("hello", model="smaller")["model"] == "smaller"
    assert sim.ask("POST", "/v1/completions", b'{"prompt": "x", "model": "tiny"}')[0] == 404


def test_the_cache_publishes_what_it_gains_and_loses(live_sim: Start) -> None:
    context = zmq.Context()
    try:
        with context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.setsockopt(zmq.RCVTIMEO, 10_000)
            monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            port = subscriber.bind_to_random_port("tcp://127.0.0.1")
            config = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
            sim = live_sim(kv_events_config=config, kv_cache_size=8, max_model_len=128)
            monitor.recv_multipart()
            monitor.close()
            events = _events_until_removed(sim, subscriber)
    finally:
        context.term()
    stored, removed = events[0], events[-1]
    assert stored["token_ids"] == list(range(64))
    assert len(stored["block_hashes"]) == 4
    assert set(removed["block_hashes"]) <= set(stored["block_hashes"])


def _events_until_removed(
    sim: LiveSim, subscriber: zmq.Socket[bytes]
) -> list[dict[str, list[int]]]:
    """The events of prompts that do not fit beside each other, up to the first eviction."""
    first = 0
    got: list[dict[str, Any]] = []
    while not any(event["type"] == "BlockRemoved" for event in got):
        if subscriber.poll(200) == 0:
            sim.complete(list(range(first, first + 64)), 1)
            first += 1000
            continue
        topic, _, payload = subscriber.recv_multipart()
        assert topic == f"kv@127.0.0.1:{sim.port}".encode()
        got += msgspec.msgpack.decode(payload)[1]
        removed = [at for at, event in enumerate(got) if event["type"] == "BlockRemoved"]
        got = got[: removed[0] + 1] if removed else got
    return got


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_unknown_path_is_404_and_a_wrong_method_405(live_sim: Start, path: str) -> None:
    sim = live_sim()
    assert sim.ask("GET", path)[0] == 405
    assert sim.ask("GET", "/nothing")[0] == 404


@pytest.mark.parametrize(("policy", "order"), [("priority", [3, 7]), ("fcfs", [7, 3])])
async def test_those_that_wait_run_by_priority_where_the_engine_schedules_by_it(
    policy: Any, order: list[int]
) -> None:
    engine = SimEngine(SimSettings(model="tiny", max_num_seqs=1, scheduling_policy=policy))
    ran: list[int] = []

    async def run(priority: int) -> None:
        body = {"prompt": [1], "priority": priority}
        request = parse_request(body, "completion", engine.tokenizer, ("tiny",), 100)
        generation = await engine.admit(request)
        ran.append(request.priority)
        await asyncio.sleep(0)
        generation.close()

    await asyncio.gather(*(run(priority) for priority in (0, 7, 3)))
    await engine.close()
    assert ran == [0, *order]


def test_a_long_prompt_holds_up_the_tokens_of_an_answer_where_steps_are_shared(
    live_sim: Start,
) -> None:
    sim = live_sim(shared_steps=True, prefill_time_per_token="1ms", inter_token_latency="1ms")
    stream = {"prompt": [1], "max_tokens": 200, "stream": True, "model": "tiny"}
    talking = threading.Thread(
        target=sim.ask, args=("POST", "/v1/completions", json.dumps(stream).encode())
    )
    talking.start()
    while not sim.metric("vllm:num_requests_running"):
        pass
    sim.complete([7] * 300, 1)
    talking.join(DEADLINE_S)
    longest = sim.metric("vllm:inter_token_latency_seconds_bucket", le="0.1")
    assert longest == sim.metric("vllm:inter_token_latency_seconds_count") - 1
