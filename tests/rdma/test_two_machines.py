"""Prefill and decode on two machines: KV lands in a store there, and is read from here over RDMA.

On the other machine run a store node and a prefill engine that maps its pool; on this one a decode
engine, which reads the pool over Soft-RoCE, and the router. The engines are simulated, with real
bytes: their tokens depend on the KV that they hold.
"""

import itertools
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from tests.fakes.patience import eventually
from tests.rdma.programs import begin, metric
from tests.rdma.rig import MIB, Control

from kvrouter.tools.sim.kv_bytes import Oracle
from kvrouter.tools.sim.settings import SimSettings
from kvrouter_store.client.blocking import StoreClient

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(300)]
THERE = "10.77.0.2"
BLOCK_TOKENS, KV_BYTES, ANSWER_TOKENS = 16, 4096, 24
LENGTHS = (7, 17, 100, 1000, 4000)
LONG = 4000  # 16 MB of KV
# What an answer may wait for: the prefill engine, the landing, and the store, twice. An engine has
# to answer within the first, with what it waits for the store.
REQUEST_S, LANDING_S, STORE_S = 20, 10, 8
BOUND_S = REQUEST_S + LANDING_S + 2 * STORE_S
CUT_S = 45.0
PATIENCE_S = 120.0
SIM = (
    *("--model", "tiny", "--port", "0", "--block-size", str(BLOCK_TOKENS)),
    *("--kv-bytes-per-token", str(KV_BYTES), "--store-deadline", f"{STORE_S}s"),
)


@dataclass
class Fleet:
    """What runs, and who asks it."""

    router: str
    prefill: str
    decode: str
    store: StoreClient
    oracle: Oracle
    numbers: Iterator[int]

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that no prompt before began with."""
        return [next(self.numbers), *range(1, tokens)]

    def ask(self, prompt: list[int]) -> float:
        """Ask the router; the seconds until the whole answer. A wrong one fails the test."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.router}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=2 * BOUND_S) as answer:
            text = json.load(answer)["choices"][0]["text"]
        seconds = time.monotonic() - began
        assert text == self.oracle.text(prompt, ANSWER_TOKENS)
        return seconds

    def counts(self) -> dict[str, float]:
        """What was counted until now."""
        stats = self.store.stats()
        return {
            "landings": metric(self.router, "kvrouter:landings_total", outcome="landed"),
            "prefilled": metric(self.prefill, "vllm:prompt_tokens_total"),
            "loaded": metric(self.decode, "vllm:external_prefix_cache_hits_total"),
            "errors": metric(self.decode, "kvsim:store_errors_total"),
            "wrong": metric(self.decode, "kvsim:wrong_blocks_total"),
            "bytes over rdma": stats["bytes_out_total.rdma"],
            "bytes": stats["bytes_out_total"],
        }

    def since(self, before: dict[str, float]) -> dict[str, float]:
        """What was counted since then."""
        return {name: now - before[name] for name, now in self.counts().items()}


def loadable(prompts: Sequence[list[int]]) -> int:
    """Tokens of whole blocks; the last token of a prompt is always computed."""
    return sum((len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts)


@pytest.fixture(scope="module")
def fleet(hands: Callable[[], Control]) -> Iterator[Fleet]:
    """Everything started, and both engines known to the router."""

    def there(*command: str) -> dict[str, str]:
        urls: dict[str, str] = hands().ask("run", command=command)
        return urls

    with ExitStack() as programs:
        node = there(
            *("store", "--host", THERE, "--insecure", "--http-port", "0", "--rdma", "on"),
            *("--memory", "128MiB", "--unix-socket", "/run/tmp/store.sock"),
        )["kv"]
        with ThreadPoolExecutor() as both:
            sim = ("sim", "--store", node, *SIM)
            far = both.submit(there, *sim, "--role", "prefill", "--host", THERE)
            near = both.submit(begin, programs, [*sim, "--role", "decode", "--transport", "rdma"])
        prefill, decode = far.result()["http"], near.result()["http"]
        router = begin(
            programs,
            [
                *("serve", "--port", "0", "--store", node, "--log-level", "warning"),
                *("--prefill", prefill, "--decode", decode),
                *("--request-timeout", str(REQUEST_S), "--landing-timeout", str(LANDING_S)),
            ],
        )
        client = programs.enter_context(StoreClient(node, transport="tcp", deadline_s=STORE_S))
        made = Fleet(router["http"], prefill, decode, client, oracle(), itertools.count(5000))
        assert eventually(lambda: metric(made.router, "kvrouter:worker_up") == 2, PATIENCE_S)
        yield made


def oracle() -> Oracle:
    """Computes everything."""
    settings = SimSettings(model="tiny", block_size=BLOCK_TOKENS, kv_bytes_per_token=KV_BYTES)
    return Oracle(settings.manifest)


def test_decode_answers_from_kv_that_landed_on_the_other_machine(fleet: Fleet) -> None:
    prompts = [fleet.prompt(length) for length in LENGTHS]
    before = fleet.counts()
    seconds = [fleet.ask(prompt) for prompt in prompts]
    moved = fleet.since(before)
    took = ", ".join(f"{n} tokens {s:.2f} s" for n, s in zip(LENGTHS, seconds, strict=True))
    print(f"\ncold: {took}; {moved}")
    split = [prompt for prompt in prompts if len(prompt) > BLOCK_TOKENS]
    assert moved["landings"] == len(split)
    assert moved["prefilled"] == sum(map(len, split))
    assert moved["loaded"] == loadable(prompts)
    assert moved["bytes over rdma"] == moved["bytes"] == loadable(prompts) * KV_BYTES
    assert moved["errors"] == moved["wrong"] == 0
    assert metric(fleet.decode, "kvsim:store_transport", transport="rdma") == 1
    assert metric(fleet.prefill, "kvsim:store_transport", transport="shm") == 1


def test_what_has_landed_once_is_loaded_again_without_a_prefill_leg(fleet: Fleet) -> None:
    prompts = [fleet.prompt(length) for length in LENGTHS]
    for prompt in prompts:
        fleet.ask(prompt)
    before = fleet.counts()
    in_its_cache = [fleet.ask(prompt) for prompt in prompts]
    assert not any(fleet.since(before).values())
    reset = urllib.request.Request(f"{fleet.decode}/reset_prefix_cache", method="POST")
    urllib.request.urlopen(reset, timeout=PATIENCE_S).close()
    over_rdma = [fleet.ask(prompt) for prompt in prompts]
    moved = fleet.since(before)
    for what, seconds in (("own cache", in_its_cache), ("RDMA", over_rdma)):
        took = ", ".join(f"{n} tokens {s:.2f} s" for n, s in zip(LENGTHS, seconds, strict=True))
        print(f"\nwarm from {what}: {took}")
    assert moved["landings"] == moved["prefilled"] == 0
    assert moved["loaded"] == loadable(prompts)
    assert moved["bytes over rdma"] == moved["bytes"] == loadable(prompts) * KV_BYTES


def test_a_link_that_is_cut_amid_a_load_costs_time_and_no_answer(
    fleet: Fleet, hands: Callable[[], Control]
) -> None:
    before, link = fleet.counts(), hands()
    link.ask("cut", after_bytes=MIB, for_s=CUT_S)
    amid_s = fleet.ask(fleet.prompt(LONG))
    assert metric(fleet.decode, "kvsim:store_errors_total") > before["errors"]
    assert metric(fleet.decode, "vllm:external_prefix_cache_hits_total") == before["loaded"]
    cut_off_s = fleet.ask(fleet.prompt(1000))
    assert max(amid_s, cut_off_s) < BOUND_S
    link.receive()  # it is back
    began = time.monotonic()

    def loads() -> bool:
        fleet.ask(fleet.prompt(100))
        return metric(fleet.decode, "vllm:external_prefix_cache_hits_total") > before["loaded"]

    assert eventually(loads, PATIENCE_S)
    back_s = time.monotonic() - began
    print(f"\ncut: amid a load {amid_s:.2f} s, then {cut_off_s:.2f} s, used again {back_s:.2f} s")
    assert eventually(lambda: fleet.store.stats()["leases"] == 0, PATIENCE_S)
    assert fleet.since(before)["wrong"] == 0
