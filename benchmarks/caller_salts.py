"""Can a tenant learn by the time to the first token what another one has asked? On real engines.

    python -m benchmarks.caller_salts --vllm-python PYTHON [--prompts N]

Both legs behind `--salt-from-key`, two keys. In random order: prompts that nobody has asked (cold),
prompts that the other tenant has asked (other), and prompts that the same tenant has asked (own).
AUC: how often an `other` is faster than a `cold`; .5: they cannot be told apart. A control runs the
same without the flag.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm.engines import Engine, EngineOptions, ask, running, transfer_config
from tests.vllm.install import install_into
from tests.vllm.models import TINY, Recipe, model_folder
from tests.vllm.services import Service, start_router, start_store

from benchmarks.arguments import parser_of
from kvrouter.credentials.caller_keys import file_line, new_key

PROMPT_TOKENS = 1500
RESAMPLES = 200
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Fleet:
    """Two engines, and a router with two callers, by name."""

    router: Service
    prefill: Engine
    decode: Engine
    keys: dict[str, str]

    def ask(self, caller: str, path: str = "/v1/completions", **body: Any) -> bytes:
        """The answer to a caller. RuntimeError: it is no 200."""
        asked = {"model": "tiny", "max_tokens": 1, "temperature": 0, **body}
        key = self.keys[caller]
        status, answer = ask(self.router.address, "POST", path, asked, DEADLINE_S, key)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {answer[:300]!r}")
        return answer

    def computed(self) -> int:
        """Prompt tokens that the engines have computed so far."""
        engines = (self.prefill, self.decode)
        return sum(engine.prompt_tokens().get("local_compute", 0) for engine in engines)


@contextmanager
def fleet(python: Path, folder: Path, *, salted: bool, recipe: Recipe = TINY) -> Iterator[Fleet]:
    """Start all of it; end it with the context."""
    model, store = model_folder(recipe, python), start_store(folder, memory="512MiB")
    keys = {name: new_key() for name in ("one", "two")}
    file = folder / "keys.yaml"
    file.write_text("\n".join(file_line(name, key) for name, key in keys.items()))
    router: Service | None = None
    site = install_into(python)

    def engine(name: str, core: str) -> Engine:
        transfer = transfer_config(store.url, name=name, deadline_s=10.0)
        flags = ["--enable-scale-out"]  # responses and messages have both legs
        options = EngineOptions(name, model, core, transfer, flags, kv_bytes="256M")
        return Engine.start(python, options, folder, site)

    prefill, decode = engine("prefill", "0"), engine("decode", "1")
    try:
        with running([prefill, decode]):
            flags = ["--api-key-file", str(file), *(["--salt-from-key"] if salted else [])]
            router = start_router(folder, [prefill.url], [decode.url], store.url, flags)
            for each in (prefill, decode):
                router.wait_log(f"engine {each.address} joins")
            yield Fleet(router, prefill, decode, keys)
    finally:
        if router is not None:
            router.stop()
        store.stop()


def times(here: Fleet, count: int) -> dict[str, list[float]]:
    """Seconds of `count` requests of each kind, in random order."""
    rng = random.Random(42)
    asked = {
        kind: [[rng.randrange(3, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
        for kind in ("cold", "other", "own")
    }
    for kind, caller in (("other", "one"), ("own", "two")):
        for prompt in asked[kind]:
            here.ask(caller, prompt=prompt)
    order = [(kind, prompt) for kind, prompts in asked.items() for prompt in prompts]
    rng.shuffle(order)
    found: dict[str, list[float]] = {kind: [] for kind in asked}
    for kind, prompt in order:
        begun_s = time.monotonic()
        here.ask("two", prompt=prompt)
        found[kind].append(time.monotonic() - begun_s)
    return found


def auc(faster: list[float], slower: list[float]) -> float:
    """How often one of the first is below one of the second; ties count half."""
    won = sum((a < b) + 0.5 * (a == b) for a in faster for b in slower)
    return won / (len(faster) * len(slower))


def interval(faster: list[float], slower: list[float]) -> tuple[float, float]:
    """The 90 % interval of the AUC, by resampling."""
    rng = random.Random(1)
    found = sorted(
        auc(rng.choices(faster, k=len(faster)), rng.choices(slower, k=len(slower)))
        for _ in range(RESAMPLES)
    )
    return found[len(found) // 20], found[-len(found) // 20 - 1]


def main() -> int:
    """Exit status: 1 if a tenant can tell what another has asked (the whole interval above .55)."""
    parser = parser_of("benchmarks.caller_salts", __doc__)
    parser.add_argument("--vllm-python", type=Path, required=True, help="of tests/vllm/make_env.sh")
    parser.add_argument("--prompts", type=int, default=60, help="of each kind")
    arguments = parser.parse_args()
    told = False
    for salted in (True, False):
        with (
            tempfile.TemporaryDirectory(prefix="salts-") as name,
            fleet(arguments.vllm_python, Path(name), salted=salted) as here,
        ):
            found = times(here, arguments.prompts)
        low, high = interval(found["other"], found["cold"])
        medians = " ".join(f"{k} {statistics.median(v) * 1e3:.0f}" for k, v in found.items())
        print(
            f"{'with' if salted else 'without'} --salt-from-key: median ms {medians}; AUC of other "
            f"against cold {auc(found['other'], found['cold']):.2f} ({low:.2f} to {high:.2f})",
            flush=True,
        )
        told |= salted and low > 0.55
    return int(told)


if __name__ == "__main__":
    sys.exit(main())
