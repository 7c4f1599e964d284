"""Time to the first token of a model of 7B, on real vLLM engines that share one GPU.

    python -m benchmarks.vllm_ttft --vllm-python PYTHON [--tokens N] [--prompts N] [--json FILE]

The weights are vLLM's dummies, the same in both engines; graphs and compilation are off. Each new
prompt is computed by the first engine (cold), found in its own cache, and then, once the store has
it, loaded from there by the second one. More new prompts go through a router: prefill leg, store,
decode leg. Medians. The store has less memory than all prompts need: its pages have all been used.

Exit status 1 where tokens differ, or where a prompt did not come from the store. Without
KVROUTER_VLLM_DEVICE=cuda the engines run on a CPU, with a model of 29M parameters.
"""

import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from tests.vllm.engines import ON_GPU, Engine, EngineOptions, running, transfer_config
from tests.vllm.install import install_into
from tests.vllm.models import MID, TINY, model_folder
from tests.vllm.services import start_router, start_store

from benchmarks.arguments import parser_of
from benchmarks.dispatch import first_token

BLOCK_TOKENS, SALT = 32, "ttft"
SEVEN_B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
}
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2 if ON_GPU else 16 << 10  # of KV
WARM_UP, LANDED_S = 3, 0.25
LEAST_LOADED = 0.95  # of the prompts that the second engine answers; it always computes a token


def model(folder: Path, python: Path) -> Path:
    """The model's folder: for a GPU, a configuration of 7B without weights."""
    if not ON_GPU:
        return model_folder(MID, python)
    large = folder / "model"
    large.mkdir()
    for file in model_folder(TINY, python).iterdir():
        if file.suffix != ".safetensors":
            (large / file.name).write_bytes(file.read_bytes())
    config = json.loads((large / "config.json").read_text())
    config |= SEVEN_B | {"layer_types": ["full_attention"] * SEVEN_B["num_hidden_layers"]}
    (large / "config.json").write_text(json.dumps(config))
    return large


class Rig:
    """Two engines beside one store, in a folder; new prompts of so many tokens."""

    def __init__(self, python: Path, folder: Path, tokens: int) -> None:
        self.tokens = tokens
        self.folder = folder
        self.store = start_store(folder, memory=f"{5 * tokens * TOKEN_BYTES >> 20}MiB")
        self._python, self._model = python, model(folder, python)
        self._draw = random.Random(7)

    def engine(self, name: str) -> Engine:
        """One of the engines, starting."""
        host_bytes = 4 * self.tokens * TOKEN_BYTES
        transfer = transfer_config(
            self.store.url, name=name, weights_revision="dummy", save="prompt"
        )
        transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] = host_bytes
        options = EngineOptions(
            name,
            self._model,
            "0" if name == "prefill" else "1",
            transfer,
            ("--load-format", "dummy"),
            BLOCK_TOKENS,
            max_tokens=2 * self.tokens,
            kv_bytes=f"{8 * self.tokens * TOKEN_BYTES >> 20}M",
        )
        return Engine.start(self._python, options, self.folder, install_into(self._python))

    def prompt(self) -> list[int]:
        """A new one."""
        return [self._draw.randrange(10, 2000) for _ in range(self.tokens)]

    def landed(self) -> None:
        """Return once the store takes no more blocks."""
        before = -1
        while (now := self.store.stats()["commits_total"]) != before:
            before = now
            time.sleep(LANDED_S)


def measure(rig: Rig, prompts: int) -> dict[str, Any]:
    """The figures."""
    times: dict[str, list[float]] = defaultdict(list)
    different = 0

    def asked(name: str, address: str, prompt: list[int]) -> list[int]:
        took, tokens = first_token(address, prompt, SALT)
        times[name].append(took)
        return tokens

    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    with running([prefill, decode]):
        for engine in WARM_UP * (prefill, decode):
            first_token(engine.address, rig.prompt(), SALT)
        loaded = external(decode)
        for _ in range(prompts):
            prompt = rig.prompt()
            expected = asked("cold", prefill.address, prompt)
            different += asked("own cache", prefill.address, prompt) != expected
            rig.landed()
            different += asked("store", decode.address, prompt) != expected
        router = start_router(
            rig.folder, [prefill.url], [decode.url], rig.store.url, ["--prefill-threshold", "0"]
        )
        try:
            for engine, role in ((prefill, "prefill"), (decode, "decode")):
                router.wait_log(f"engine {engine.address} joins as {role}")
            for _ in range(prompts):
                asked("cold, both legs", router.address, rig.prompt())
        finally:
            router.stop()
        loaded = external(decode) - loaded
    return {
        "ttft_s": {name: median(values) for name, values in times.items()},
        "times_s": times,
        "different": different,
        "loaded_share": loaded / (2 * prompts * rig.tokens),
    }


def external(engine: Engine) -> int:
    """Prompt tokens that an engine has loaded."""
    return engine.prompt_tokens()["external_kv_transfer"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the figures to --json."""
    parser = parser_of("benchmarks.vllm_ttft", __doc__)
    parser.add_argument("--vllm-python", type=Path, required=True, help="that can import vllm")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt (default: 8192)")
    parser.add_argument("--prompts", type=int, default=7, help="of each kind (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="vllm-ttft-") as name, ExitStack() as stack:
        rig = Rig(options.vllm_python, Path(name), options.tokens)
        stack.callback(rig.store.stop)
        figures = measure(rig, options.prompts)
    kv_bytes = options.tokens * TOKEN_BYTES
    print(f"{options.tokens} tokens, {kv_bytes >> 20} MiB of KV")
    for name, seconds in figures["ttft_s"].items():
        print(f"  {name}: {1e3 * seconds:.0f} ms")
    print(f"  {figures['loaded_share']:.1%} of the second engine's tokens came from the store")
    print(f"  {figures['different']} answers differ")
    if options.json:
        options.json.write_text(json.dumps({"kv_bytes": kv_bytes, **figures}, indent=2) + "\n")
    return 1 if figures["different"] or figures["loaded_share"] < LEAST_LOADED else 0


if __name__ == "__main__":
    sys.exit(main())
