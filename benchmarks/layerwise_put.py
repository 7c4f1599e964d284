"""What putting KV layer by layer adds to a prefill: `python -m benchmarks.layerwise_put`.

The engine of examples/torch_engine computes prompts of a model with random weights, without a store
(A) and with one on this host (B), in rounds of A B B A; every prompt is new. The time is that of
one token, until all of the prompt's KV is in the store. Then the prompts are loaded: the time of
the token, and of loading alone. Beside both stands how long a plain copy of the same bytes takes:
in host memory, or between a GPU and pinned memory. Bar `layerwise_put`: the median round adds at
most 10 %, on a GPU 1 %.

Needs torch and transformers beside kvrouter. By default one thread computes: on a busy machine
threads that wait for one another would be all that is measured.
"""

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.arguments import parser_of

BARS = {"cpu": 1.10, "cuda": 1.01}
BLOCK_TOKENS, VOCABULARY = 32, 4096
WARM_UP, LOADS = 6, 3
BEYOND_CACHES = 512 << 20
POOL_PROMPTS = 4  # fit into the store: after the warm-up all of its memory has been written once
MODELS = {
    "small": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1536,
    },
    "7b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
}


@dataclass(frozen=True)
class Plan:
    """What is measured: a model, how it computes, and prompts of so many tokens."""

    model: str
    device: str
    dtype: str
    tokens: int
    chunk_tokens: int
    rounds: int

    @property
    def kv_bytes(self) -> int:
        """Of a prompt's whole blocks."""
        shape = MODELS[self.model]
        head = shape["hidden_size"] // shape["num_attention_heads"]
        elements = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
        size = 4 if self.dtype == "float32" else 2
        return elements * size * (self.tokens // BLOCK_TOKENS * BLOCK_TOKENS)


@contextmanager
def running_store(folder: Path, memory: int) -> Iterator[str]:
    """A node in a process of its own, with so many bytes; its URL."""
    command = [
        *(sys.executable, "-m", "kvrouter", "store", "--port", "0", "--http-port", "0"),
        *("--memory", str(memory), "--eviction", "lru"),
        *("--unix-socket", str(folder / "store.sock")),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"kv://[\d.]+:\d+", process.stdout.readline())
            if found is None:
                raise SystemExit("the store did not start")
            yield found[0]
        finally:
            process.terminate()


class Contest:
    """Two engines with one network, one of which puts. close() ends them."""

    def __init__(self, plan: Plan, store: str) -> None:
        from kvrouter_store.torch_engine.generation import Engine  # noqa: PLC0415
        from kvrouter_store.torch_engine.settings import EngineSettings  # noqa: PLC0415

        more: dict[str, Any] = {
            "block_tokens": BLOCK_TOKENS,
            "chunk_tokens": plan.chunk_tokens,
            "device": plan.device,
            "dtype": plan.dtype,
            "max_model_len": 2 * plan.tokens,
        }
        model = random_model(plan)
        self.settings = EngineSettings(plan.model, store=store, role="prefill", **more)
        self.engines = {
            "A": Engine(EngineSettings(plan.model, **more), model),
            "B": Engine(self.settings, model),
        }
        self.plan = plan
        self._model = model
        self._draw = random.Random(1)

    def prompt(self) -> list[int]:
        """A new one."""
        return [self._draw.randrange(VOCABULARY) for _ in range(self.plan.tokens)]

    def prefill(self, name: str, prompt: list[int], cached_tokens: int = 0) -> "Prefill":
        """One token of a prompt. AssertionError where its KV is then not in the store."""
        from kvrouter_store.torch_engine.generation import GenerateRequest  # noqa: PLC0415

        told = list[float]()

        def go_on(_token: int) -> bool:
            told.append(time.perf_counter())
            return True

        begun = time.perf_counter(), time.process_time()
        answer = self.engines[name].generate(GenerateRequest(prompt, 1), go_on)
        ended, cpu_s = time.perf_counter(), time.process_time() - begun[1]
        if answer.transfer is not None:
            assert answer.cached_tokens == cached_tokens
            assert answer.transfer["kvstore"]["blocks"] == self.plan.tokens // BLOCK_TOKENS
        return Prefill(told[0] - begun[0], ended - told[0], cpu_s)

    def load_s(self, prompt: list[int]) -> float:
        """Seconds of loading what the store has of a prompt: all but its last chunk."""
        from kvrouter_store.torch_engine.kv_cache import CacheMemory  # noqa: PLC0415
        from kvrouter_store.torch_engine.sharing import SharedPrompt  # noqa: PLC0415

        sharing = self.engines["B"].sharing
        assert sharing is not None
        names = sharing.names(prompt, None)
        with (
            CacheMemory(self.settings, self._model).sequence(self.plan.tokens) as cache,
            SharedPrompt(sharing, names, cache) as shared,
        ):
            begun = time.perf_counter()
            assert shared.load(self.plan.tokens - 1) == self.loaded_tokens
            return time.perf_counter() - begun

    @property
    def loaded_tokens(self) -> int:
        """Tokens of a known prompt that are loaded: one is always computed, with its chunk."""
        return (self.plan.tokens - 1) // self.plan.chunk_tokens * self.plan.chunk_tokens

    @cached_property
    def copy_s(self) -> float:
        """Seconds of a plain copy of a prompt's KV that no cache holds, into memory in use."""
        import torch  # noqa: PLC0415

        shape = max(2, BEYOND_CACHES // self.plan.kv_bytes), self.plan.kv_bytes
        sources = torch.ones(shape, dtype=torch.uint8, device=self.plan.device)
        targets = torch.ones(shape, dtype=torch.uint8, pin_memory=self.plan.device != "cpu")
        took = list[float]()
        for target, source in zip(targets, sources, strict=True):
            begun = time.perf_counter()
            target.copy_(source)
            took.append(time.perf_counter() - begun)
        return statistics.median(took)

    def close(self) -> None:
        """End both engines."""
        for engine in self.engines.values():
            engine.close()


@dataclass(frozen=True)
class Prefill:
    """Seconds to the token, from there until all KV is stored, and of CPU in all threads."""

    token_s: float
    landing_s: float
    cpu_s: float

    @property
    def whole_s(self) -> float:
        """Until the KV is stored."""
        return self.token_s + self.landing_s


def random_model(plan: Plan) -> Any:
    """A model of random weights, on the device."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, Qwen2Config  # noqa: PLC0415

    from kvrouter_store.torch_engine.model import Model  # noqa: PLC0415

    torch.manual_seed(1)
    config = Qwen2Config(
        **MODELS[plan.model], vocab_size=VOCABULARY, max_position_embeddings=2 * plan.tokens
    )
    config._commit_hash = f"random weights of {plan.model}"
    with torch.device(plan.device):
        network = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, plan.dtype))
    return Model(network.eval(), None, plan.model)


def measure(contest: Contest) -> dict[str, Any]:
    """The figures."""
    plan = contest.plan
    for name in "A" + WARM_UP * "B":
        contest.prefill(name, contest.prompt())
    ratios, cpu_ratios = list[float](), list[float]()
    alone, landings = list[float](), list[float]()
    for _ in range(plan.rounds):
        a1, b1, b2, a2 = (contest.prefill(name, contest.prompt()) for name in "ABBA")
        alone += [a1.whole_s, a2.whole_s]
        landings += [b1.landing_s, b2.landing_s]
        ratios.append((b1.whole_s + b2.whole_s) / (a1.whole_s + a2.whole_s))
        cpu_ratios.append((b1.cpu_s + b2.cpu_s) / (a1.cpu_s + a2.cpu_s))
    return {
        "prefill_s": statistics.median(alone),
        "ratio": statistics.median(ratios),
        "ratios": sorted(ratios),
        "cpu_ratio": statistics.median(cpu_ratios),
        "landing_s": statistics.median(landings),
        "kv_bytes": plan.kv_bytes,
        "copy_share": contest.copy_s / statistics.median(alone),
        **warm(contest),
    }


def warm(contest: Contest) -> dict[str, float]:
    """Prompts that the store has: seconds to the token, and GB/s of loading."""
    warm_s, load_s = list[float](), list[float]()
    for _ in range(LOADS):
        prompt = contest.prompt()
        contest.prefill("B", prompt)
        warm_s.append(contest.prefill("B", prompt, contest.loaded_tokens).token_s)
        load_s.append(contest.load_s(prompt))
    loaded = contest.plan.kv_bytes * contest.loaded_tokens / contest.plan.tokens
    gb_s = loaded / statistics.median(load_s) / 1e9
    copy_gb_s = contest.plan.kv_bytes / contest.copy_s / 1e9
    return {
        "warm_s": statistics.median(warm_s),
        "load_gb_s": gb_s,
        "load_share_of_copy": gb_s / copy_gb_s,
    }


def processor(device: str) -> str:
    """What computes."""
    if device != "cpu":
        import torch  # noqa: PLC0415

        return str(torch.cuda.get_device_name(device))
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else "an unknown processor"


def report(plan: Plan, figures: dict[str, Any], bar: float) -> None:
    """Print the figures."""
    print(f"{plan.tokens} tokens, {plan.dtype}, {figures['kv_bytes'] >> 20} MiB of KV")
    print(f"  {processor(plan.device)}")
    print(f"  prefill without a store {1e3 * figures['prefill_s']:.0f} ms")
    least, most = figures["ratios"][0], figures["ratios"][-1]
    print(f"  layer-wise put adds {figures['ratio'] - 1:+.1%} (bar {bar - 1:.0%})")
    print(f"  rounds from {least - 1:+.1%} to {most - 1:+.1%}")
    print(f"  in CPU time of the engine {figures['cpu_ratio'] - 1:+.1%}")
    print(f"  all is stored {1e3 * figures['landing_s']:.1f} ms after the token")
    print(f"  a plain copy of the same bytes would add {figures['copy_share']:.1%}")
    share = f"{figures['load_share_of_copy']:.0%} of a plain copy"
    print(f"  with KV from the store {1e3 * figures['warm_s']:.0f} ms")
    print(f"  loaded at {figures['load_gb_s']:.1f} GB/s, {share}")


def main() -> None:
    """Measure, print, and write the figures to --json; 1 where the bar is missed."""
    parser = parser_of("benchmarks.layerwise_put", __doc__)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of A B B A (default: 8)")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt (default: 512)")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="at once (default: 256)")
    parser.add_argument("--threads", type=int, default=1, help="that compute (default: 1)")
    parser.add_argument("--model", default="small", choices=MODELS)
    parser.add_argument("--device", default="cpu", choices=BARS)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    options = vars(parser.parse_args())
    file, threads = options.pop("json"), options.pop("threads")
    plan = Plan(**options)
    import torch  # noqa: PLC0415

    torch.set_num_threads(threads)
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory()))
        store = owned.enter_context(running_store(folder, POOL_PROMPTS * plan.kv_bytes))
        figures = measure(owned.enter_context(closing(Contest(plan, store))))
    bar = BARS[plan.device]
    met = figures["ratio"] <= bar
    report(plan, figures, bar)
    print(f"  bar layerwise_put: {'met' if met else 'MISSED'}")
    if file:
        result = {"figures": figures, "bars": {"layerwise_put": met}}
        file.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
