"""TTFT of long random prompts, cold and warm, compared with the proxy that kvrouter grew from.

    python -m benchmarks.headline --vllm-python PYTHON [--json FILE]

Real vLLM engines on a CPU (29M parameters, float32), one core each. The load is vLLM's own
`bench serve`: all prompts at once, twice with the same seed. There are three set-ups with the same
engine flags: `seed` (the old proxy, a file connector), `ours` (kvrouter serve and store; the decode
engine restarts between the runs, so that only the store is warm) and `floor` (the decode engine
alone; the second run uses its own cache). Every engine first answers a burst of short, unrelated
prompts: the first batches of a process take seconds, and in a warm run only the restarted engine
would pay for them. Ten minutes on two cores.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.vllm.engines import Engine, EngineOptions, free_port, transfer_config
from tests.vllm.install import install_into
from tests.vllm.models import MID, model_folder
from tests.vllm.services import Service, start_router, start_store

from benchmarks.arguments import parser_of

HERE = Path(__file__).parent
BLOCK_TOKENS = 64
COLD_BAR, WARM_BAR, STORE_BAR = 1.05, 1.3, 0.98


@dataclass(frozen=True)
class Load:
    """The load of each set-up."""

    prompts: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Run:
    """One run of the load: seconds to the first token, and the source of the decode engine's KV.

    `sources`: prompt tokens of this run by vllm:prompt_tokens_by_source_total. `plans`: requests by
    kvrouter's plan.
    """

    mean_ttft_s: float
    median_ttft_s: float
    duration_s: float
    completed: int
    sources: dict[str, int]
    plans: dict[str, int] = field(default_factory=dict)

    @property
    def stored_share(self) -> float:
        """The share of the prompt tokens that came over the connector."""
        total = sum(self.sources.values())
        return self.sources.get("external_kv_transfer", 0) / total if total else 0.0


class Sitting:
    """Starts engines and runs the load; all processes end with `stack`."""

    def __init__(self, python: Path, load: Load, folder: Path, stack: ExitStack) -> None:
        self._python = python
        self._model = model_folder(MID, python)
        site = install_into(python)
        self._paths = [str(HERE), *([str(site)] if site else [])]
        self._load = load
        self._folder = folder
        self._stack = stack

    def engine(self, name: str, core: str, transfer: dict[str, Any] | None) -> Engine:
        """Start an engine without waiting for it."""
        options = EngineOptions(
            name,
            self._model,
            core=core,
            transfer=transfer,
            block_tokens=BLOCK_TOKENS,
            max_tokens=8192,
            kv_bytes="1G",
            environment={"PYTHONPATH": os.pathsep.join(self._paths)},
        )
        engine = Engine.start(self._python, options, self._folder, None)
        self._stack.callback(engine.stop)
        return engine

    def ready(self, *engines: Engine) -> None:
        """Wait for engines, and let each compute its first batches."""
        for engine in engines:
            engine.wait_ready()
            draw = random.Random(engine.options.name)
            short = [[draw.randrange(300, 4000) for _ in range(50)] for _ in range(10)]
            with ThreadPoolExecutor(len(short)) as pool:
                list(pool.map(partial(_short_answer, engine), short))

    def run(self, address: str, decode: Engine) -> Run:
        """Send the load to `address`, and read the decode engine's metrics of it."""
        before = decode.prompt_tokens()
        result = self._folder / "result.json"
        host, _, port = address.partition(":")
        command = [
            *(self._python, HERE / "headline_client.py", "--backend", "vllm"),
            *("--host", host, "--port", port, "--endpoint", "/v1/completions"),
            *("--model", "tiny", "--tokenizer", self._model, "--dataset-name", "random"),
            *("--random-input-len", self._load.prompt_tokens),
            *("--random-output-len", self._load.output_tokens),
            *("--num-prompts", self._load.prompts, "--seed", "7", "--ignore-eos"),
            *("--ready-check-timeout-sec", "0", "--disable-tqdm", "--save-result"),
            *("--result-dir", self._folder, "--result-filename", result.name),
        ]
        log = self._folder / "client.log"
        with log.open("ab") as out:
            status = subprocess.run(
                list(map(str, command)), stdout=out, stderr=out, timeout=900, check=False
            ).returncode
        if status:
            raise SystemExit(f"the load's client failed, see {log}:\n{log.read_text()[-2000:]}")
        figures = json.loads(result.read_text())
        after = decode.prompt_tokens()
        return Run(
            mean_ttft_s=figures["mean_ttft_ms"] / 1000,
            median_ttft_s=figures["median_ttft_ms"] / 1000,
            duration_s=figures["duration"],
            completed=figures["completed"],
            sources={key: int(after[key] - before.get(key, 0)) for key in after},
        )


def _short_answer(engine: Engine, prompt: list[int]) -> None:
    engine.complete(prompt=prompt, max_tokens=4, ignore_eos=True)


def seed(sitting: Sitting, folder: Path, stack: ExitStack) -> list[Run]:
    """The old proxy in front of two engines that share blocks through files."""
    blocks = folder / "blocks"
    blocks.mkdir()
    transfer = {
        "kv_connector": "FileConnector",
        "kv_connector_module_path": "headline_filekv",
        "kv_connector_extra_config": {"folder": str(blocks)},
    }
    prefill = sitting.engine("seed-prefill", "0", {**transfer, "kv_role": "kv_producer"})
    decode = sitting.engine("seed-decode", "1", {**transfer, "kv_role": "kv_consumer"})
    port = free_port()
    proxy = Service.start(
        "seed-proxy",
        [sys.executable, HERE / "headline_seed_proxy.py", port, prefill.url, decode.url],
        folder,
    )
    stack.callback(proxy.stop)
    sitting.ready(prefill, decode)
    proxy.wait_port(port)
    return [sitting.run(f"127.0.0.1:{port}", decode) for _ in range(2)]


def ours(sitting: Sitting, folder: Path, stack: ExitStack) -> list[Run]:
    """Kvrouter in front of the same engines; the decode engine restarts between the runs."""
    store = start_store(folder, memory="2GiB")
    stack.callback(store.stop)
    consumer = transfer_config(store.url, "kv_consumer")
    prefill = sitting.engine("prefill", "0", transfer_config(store.url, "kv_producer"))
    decode = sitting.engine("decode", "1", consumer)
    sitting.ready(prefill, decode)
    runs = [_through_router(sitting, prefill, decode, store.url, folder)]
    decode.stop()
    decode = sitting.engine("decode-again", "1", consumer)
    sitting.ready(decode)
    runs.append(_through_router(sitting, prefill, decode, store.url, folder))
    return runs


def _through_router(
    sitting: Sitting, prefill: Engine, decode: Engine, store_url: str, folder: Path
) -> Run:
    router = start_router(folder, [prefill.url], [decode.url], store_url, ["--prefill-threshold=0"])
    try:
        run = sitting.run(router.address, decode)
    finally:
        router.stop()
    lines = [json.loads(line) for line in router.log.read_text().splitlines() if line[:1] == "{"]
    plans = Counter(line["plan"] for line in lines if "plan" in line)
    router.log.unlink()
    return replace(run, plans=dict(plans))


def floor(sitting: Sitting, folder: Path, stack: ExitStack) -> list[Run]:
    """The decode engine alone; its cache holds all prompts in the second run."""
    decode = sitting.engine("alone", "1", None)
    sitting.ready(decode)
    return [sitting.run(decode.address, decode) for _ in range(2)]


SETUPS = {"seed": seed, "ours": ours, "floor": floor}


def measure(python: Path, load: Load) -> dict[str, list[Run]]:
    """Both runs of each set-up, one set-up after the other."""
    runs = {}
    for name, setup in SETUPS.items():
        with _sitting(python, load) as (sitting, folder, stack):
            runs[name] = setup(sitting, folder, stack)
        for which, run in zip(("cold", "warm"), runs[name], strict=True):
            print(
                f"{name:6} {which}: mean TTFT {run.mean_ttft_s:7.3f} s, median "
                f"{run.median_ttft_s:7.3f} s, {run.completed} completed, {run.sources} {run.plans}",
                flush=True,
            )
    return runs


@contextmanager
def _sitting(python: Path, load: Load) -> Iterator[tuple[Sitting, Path, ExitStack]]:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # the seed's files cost no disk
    with (
        tempfile.TemporaryDirectory(prefix="headline-", dir=memory) as name,
        ExitStack() as stack,
    ):
        folder = Path(name)
        yield Sitting(python, load, folder, stack), folder, stack


def judge(runs: dict[str, list[Run]]) -> tuple[dict[str, float], dict[str, bool]]:
    """The ratios, and whether each bar is met."""
    cold, warm = runs["ours"]
    figures = {
        "cold_to_seed": cold.mean_ttft_s / runs["seed"][0].mean_ttft_s,
        "warm_to_floor": warm.mean_ttft_s / runs["floor"][1].mean_ttft_s,
        "cold_to_warm": cold.mean_ttft_s / warm.mean_ttft_s,
        "warm_from_store": warm.stored_share,
        "blocks_loaded": warm.sources.get("external_kv_transfer", 0) / BLOCK_TOKENS,
    }
    bars = {
        f"cold <= {COLD_BAR}x the seed": figures["cold_to_seed"] <= COLD_BAR,
        f"warm <= {WARM_BAR}x the floor": figures["warm_to_floor"] <= WARM_BAR,
        f"warm tokens from the store >= {STORE_BAR}": warm.stored_share >= STORE_BAR,
    }
    return figures, bars


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; exit status 0 if every bar is met."""
    parser = parser_of("benchmarks.headline", __doc__)
    parser.add_argument("--vllm-python", type=Path, required=True, help="of tests/vllm/make_env.sh")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--output-tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    load = Load(options.prompts, options.prompt_tokens, options.output_tokens)
    runs = measure(options.vllm_python, load)
    figures, bars = judge(runs)
    print(f"blocks loaded from the store in the warm run: {figures['blocks_loaded']:.0f}")
    print(f"cold to warm, ours: {figures['cold_to_warm']:.1f} times (12.6 on the seed's L40)")
    for name, met in bars.items():
        print(f"{'met ' if met else 'MISSED'} {name}")
    if options.json:
        document = {
            "load": asdict(load),
            "runs": {name: [asdict(run) for run in pair] for name, pair in runs.items()},
            "figures": figures,
            "bars": bars,
        }
        options.json.write_text(json.dumps(document, indent=2))
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
