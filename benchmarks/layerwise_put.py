"""What putting KV layer by layer adds to a prefill: `python -m benchmarks.layerwise_put`.

The engine of examples/torch_engine computes prompts of a model with random weights, without a store
(A) and with one on this host (B), in rounds of A B B A; every prompt is new. The time is that of
one token, until all of the prompt's KV is in the store. Beside it stands how long a plain copy of
the same bytes takes. Bar `layerwise_put`: the median round adds at most 10 %.

Needs torch and transformers beside kvrouter. By default one thread computes: on a busy machine
threads that wait for one another would be all that is measured.
"""

import json
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.arguments import parser_of

BAR = 1.10
BLOCK_TOKENS, CHUNK_TOKENS = 32, 256
POOL = "32MiB"  # of four prompts: after the warm-up all of it has been written once
VOCABULARY = 4096
MODEL = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
}


@contextmanager
def running_store(folder: Path) -> Iterator[str]:
    """A node in a process of its own; its URL."""
    command = [
        *(sys.executable, "-m", "kvrouter", "store", "--port", "0", "--http-port", "0"),
        *("--memory", POOL, "--unix-socket", str(folder / "store.sock")),
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


def saved_model(folder: Path) -> str:
    """The folder of a model with random weights."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, Qwen2Config  # noqa: PLC0415

    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(Qwen2Config(**MODEL)).save_pretrained(folder / "model")
    return str(folder / "model")


class Contest:
    """Two engines with the same model, one of which puts. close() ends them."""

    def __init__(self, model: str, store: str, dtype: str, tokens: int) -> None:
        from kvrouter_store.torch_engine.generation import Engine  # noqa: PLC0415
        from kvrouter_store.torch_engine.model import Model  # noqa: PLC0415
        from kvrouter_store.torch_engine.settings import EngineSettings  # noqa: PLC0415

        sizes = {"block_tokens": BLOCK_TOKENS, "chunk_tokens": CHUNK_TOKENS}
        more = {**sizes, "dtype": dtype, "max_model_len": 2 * tokens}
        alone = EngineSettings(model, **more)  # type: ignore[arg-type]
        sharing = EngineSettings(model, store=store, role="prefill", **more)  # type: ignore[arg-type]
        self.engines = {
            "A": Engine(alone, Model.load(alone)),
            "B": Engine(sharing, Model.load(sharing)),
        }
        self.tokens = tokens
        self._draw = random.Random(1)

    def prefill(self, name: str) -> tuple[float, float]:
        """Seconds of a new prompt, and CPU seconds of all threads of this process for it.

        AssertionError where its KV is then not in the store.
        """
        from kvrouter_store.torch_engine.generation import GenerateRequest  # noqa: PLC0415

        prompt = [self._draw.randrange(VOCABULARY) for _ in range(self.tokens)]
        begun = time.perf_counter(), time.process_time()
        answer = self.engines[name].generate(GenerateRequest(prompt, 1))
        took = time.perf_counter() - begun[0], time.process_time() - begun[1]
        if answer.transfer is not None:
            assert answer.cached_tokens == 0
            assert answer.transfer["kvstore"]["blocks"] == self.tokens // BLOCK_TOKENS
        return took

    def copy_s(self) -> float:
        """Seconds of a plain copy of one prompt's KV into memory that was written before."""
        sharing = self.engines["B"].sharing
        assert sharing is not None
        import torch  # noqa: PLC0415

        size = sharing.manifest.block_bytes * (self.tokens // BLOCK_TOKENS)
        source, target = torch.ones(2, size, dtype=torch.uint8).unbind()
        begun = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begun

    def close(self) -> None:
        """End both engines."""
        for engine in self.engines.values():
            engine.close()


def measure(contest: Contest, rounds: int) -> dict[str, Any]:
    """The figures."""
    for name in "ABBBBBB":  # all of the pool has been written once
        contest.prefill(name)
    ratios, cpu_ratios, alone = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        a1, b1, b2, a2 = (contest.prefill(name) for name in "ABBA")
        alone += [a1[0], a2[0]]
        ratios.append((b1[0] + b2[0]) / (a1[0] + a2[0]))
        cpu_ratios.append((b1[1] + b2[1]) / (a1[1] + a2[1]))
    copy_s = statistics.median(contest.copy_s() for _ in range(9))
    sharing = contest.engines["B"].sharing
    assert sharing is not None
    return {
        "prefill_s": statistics.median(alone),
        "ratio": statistics.median(ratios),
        "ratios": sorted(ratios),
        "cpu_ratio": statistics.median(cpu_ratios),
        "kv_bytes": sharing.manifest.block_bytes * (contest.tokens // BLOCK_TOKENS),
        "copy_share": copy_s / statistics.median(alone),
    }


def main() -> None:
    """Measure, print, and write the figures to --json; 1 where the bar is missed."""
    parser = parser_of("benchmarks.layerwise_put", __doc__)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of A B B A (default: 8)")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt (default: 512)")
    parser.add_argument("--threads", type=int, default=1, help="that compute (default: 1)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    arguments = parser.parse_args()
    import torch  # noqa: PLC0415

    torch.set_num_threads(arguments.threads)
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory()))
        store = owned.enter_context(running_store(folder))
        contest = Contest(saved_model(folder), store, arguments.dtype, arguments.tokens)
        figures = measure(owned.enter_context(closing(contest)), arguments.rounds)
    met = figures["ratio"] <= BAR
    print(f"{arguments.tokens} tokens, {arguments.dtype}, {figures['kv_bytes'] >> 20} MiB of KV")
    print(f"  {platform.processor() or platform.machine()}")
    print(f"  prefill without a store {1e3 * figures['prefill_s']:.0f} ms")
    least, most = figures["ratios"][0], figures["ratios"][-1]
    print(f"  layer-wise put adds {figures['ratio'] - 1:+.1%} (bar {BAR - 1:.0%})")
    print(f"  rounds from {least - 1:+.1%} to {most - 1:+.1%}")
    print(f"  in CPU time of the engine {figures['cpu_ratio'] - 1:+.1%}")
    print(f"  a plain copy of the same bytes would add {figures['copy_share']:.1%}")
    print(f"  bar layerwise_put: {'met' if met else 'MISSED'}")
    if arguments.json:
        result = {"figures": figures, "bars": {"layerwise_put": met}}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
