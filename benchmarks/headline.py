"""TTFT of long random prompts, cold and warm, compared with one engine alone.

    python -m benchmarks.headline --vllm-python PYTHON [--json FILE]

Real vLLM engines on a CPU (29M parameters, float32), one core each. The load is vLLM's own
`bench serve`: all prompts at once, twice with the same seed. There are two set-ups with the same
engine flags: `ours` (kvrouter serve and store; the decode engine restarts between the runs, so that
only the store is warm) and `floor` (the decode engine alone; the second run uses its own cache).
Every engine first answers a burst of short, unrelated prompts: the first batches of a process take
seconds, and in a warm run only the restarted engine would pay for them. At most ten minutes.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.vllm.engines import Engine, transfer_config
from tests.vllm.services import start_router, start_store

from benchmarks.arguments import parser_of, write_figures
from benchmarks.connectors.peers import Joined
from benchmarks.connectors.rig import BLOCK_TOKENS, Rig
from benchmarks.offloading.rig import ask_all, prompts

HERE = Path(__file__).parent
LOAD = {"num-prompts": 10, "random-input-len": 4096, "random-output-len": 16}
WARM_BAR, STORE_BAR = 1.3, 0.98


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


class Sitting(Rig):
    """Starts engines and runs the load; all processes end with `stack`."""

    def ready(self, *engines: Engine) -> None:
        """Wait for engines, and let each compute its first batches."""
        for engine in engines:
            engine.wait_ready()
            short = prompts(engine.options.name, 10, 50)
            asyncio.run(ask_all(engine.address, short, 4))

    def run(self, address: str, decode: Engine) -> Run:
        """Send the load to `address`, and read the decode engine's metrics of it."""
        before = decode.prompt_tokens()
        result = self.folder / "result.json"
        host, _, port = address.partition(":")
        command = [
            *(self.python, HERE / "headline_client.py", "--backend", "vllm"),
            *("--host", host, "--port", port, "--endpoint", "/v1/completions"),
            *("--model", "tiny", "--tokenizer", self.model, "--dataset-name", "random"),
            *(word for name, value in LOAD.items() for word in (f"--{name}", value)),
            *("--seed", "7", "--ignore-eos"),
            *("--ready-check-timeout-sec", "0", "--disable-tqdm", "--save-result"),
            *("--result-dir", self.folder, "--result-filename", result.name),
        ]
        log = self.folder / "client.log"
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


def ours(sitting: Sitting) -> list[Run]:
    """Kvrouter in front of the same engines; the decode engine restarts between the runs."""
    store = start_store(sitting.folder, memory="2GiB")
    sitting.stack.callback(store.stop)
    consumer = Joined(transfer_config(store.url, "kv_consumer"))
    producer = Joined(transfer_config(store.url, "kv_producer"))
    prefill = sitting.engine("prefill", "0", producer)
    decode = sitting.engine("decode", "1", consumer)
    sitting.ready(prefill, decode)
    runs = [_through_router(sitting, prefill, decode, store.url)]
    decode.stop()
    decode = sitting.engine("decode-again", "1", consumer)
    sitting.ready(decode)
    runs.append(_through_router(sitting, prefill, decode, store.url))
    return runs


def _through_router(sitting: Sitting, prefill: Engine, decode: Engine, store_url: str) -> Run:
    # vLLM's client loses what follows a comment of a stream.
    flags = ["--prefill-threshold=0", "--sse-keep-alive-interval=0"]
    router = start_router(sitting.folder, [prefill.url], [decode.url], store_url, flags)
    try:
        run = sitting.run(router.address, decode)
    finally:
        router.stop()
    lines = [json.loads(line) for line in router.log.read_text().splitlines() if line[:1] == "{"]
    plans = Counter(line["plan"] for line in lines if "plan" in line)
    router.log.unlink()
    return replace(run, plans=dict(plans))


def floor(sitting: Sitting) -> list[Run]:
    """The decode engine alone; its cache holds all prompts in the second run."""
    decode = sitting.engine("alone", "1", Joined())
    sitting.ready(decode)
    return [sitting.run(decode.address, decode) for _ in range(2)]


SETUPS = {"ours": ours, "floor": floor}


def measure(python: Path) -> dict[str, list[Run]]:
    """Both runs of each set-up, one set-up after the other."""
    runs = {}
    for name, setup in SETUPS.items():
        with tempfile.TemporaryDirectory(prefix="headline-") as at, ExitStack() as stack:
            sitting = Sitting(python, Path(at), stack, max_tokens=8192, kv_bytes="1G")
            runs[name] = setup(sitting)
        for which, run in zip(("cold", "warm"), runs[name], strict=True):
            print(
                f"{name:6} {which}: mean TTFT {run.mean_ttft_s:7.3f} s, median "
                f"{run.median_ttft_s:7.3f} s, {run.completed} completed, {run.sources} {run.plans}",
                flush=True,
            )
    return runs


def judge(runs: dict[str, list[Run]]) -> tuple[dict[str, float], dict[str, bool]]:
    """The ratios, and whether each bar is met."""
    cold, warm = runs["ours"]
    figures = {
        "warm_to_floor": warm.mean_ttft_s / runs["floor"][1].mean_ttft_s,
        "cold_to_warm": cold.mean_ttft_s / warm.mean_ttft_s,
        "warm_from_store": warm.stored_share,
        "blocks_loaded": warm.sources.get("external_kv_transfer", 0) / BLOCK_TOKENS,
    }
    completed = {run.completed for pair in runs.values() for run in pair}
    bars = {
        "every prompt is answered": completed == {LOAD["num-prompts"]},
        f"warm <= {WARM_BAR}x the floor": figures["warm_to_floor"] <= WARM_BAR,
        f"warm tokens from the store >= {STORE_BAR}": warm.stored_share >= STORE_BAR,
    }
    return figures, bars


def main() -> int:
    """Run and print; exit status 0 if every bar is met."""
    parser = parser_of("benchmarks.headline", __doc__)
    parser.add_argument("--vllm-python", type=Path, required=True, help="of tests/vllm/make_env.sh")
    options = parser.parse_args()
    runs = measure(options.vllm_python)
    figures, bars = judge(runs)
    print(f"blocks loaded from the store in the warm run: {figures['blocks_loaded']:.0f}")
    print(f"cold to warm, ours: {figures['cold_to_warm']:.1f} times")
    for name, met in bars.items():
        print(f"{'met ' if met else 'MISSED'} {name}")
    told = {name: [asdict(run) for run in pair] for name, pair in runs.items()}
    document = {"load": LOAD, "runs": told, "figures": figures, "bars": bars}
    write_figures(options.json, document)
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
