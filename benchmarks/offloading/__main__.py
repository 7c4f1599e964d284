"""A store that engines share, beside vLLM's own offloading to private memory, on one GPU.

    python -m benchmarks.offloading --vllm-python PYTHON [--only PART...] [--json FILE]

A model of 7B with vLLM's dummy weights, CUDA graphs on. Engines: `none` has no connector, `store`
and `other` have kvrouter's with its defaults, `packed` has a cache in which a block of all layers
is one piece, `native` is vLLM's own offloading. Parts:

    lengths   time to the first token: computed, and loaded; medians
    at_once   all prompts at once, twice, and from another engine's puts
    streams   pauses of eight streams: alone, beside hits, beside prompts that are computed
    legs      new prompts through both legs, beside an engine alone
    fleet     conversations on two engines behind the router, all host memory together the same

Exit status 1 where answers differ, or where a prompt was not loaded. Without
KVROUTER_VLLM_DEVICE=cuda the engines run on a CPU, with a model of 29M parameters, and there is no
`native`: to see that all of it works.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.vllm.engines import ON_GPU
from tests.vllm.services import start_store

from benchmarks.arguments import parser_of, write_figures
from benchmarks.offloading.parts import (
    Rows,
    at_once,
    fleet,
    legs,
    lengths,
    streamed_tokens,
    streams,
)
from benchmarks.offloading.rig import TOKEN_BYTES, WARM_TOKENS, Rig, Wrong
from kvrouter.tools.docs import markdown

SIZES = (2048, 8192, 32000) if ON_GPU else (512, 2048)
SIZE = 8192 if ON_GPU else 1024
ROUNDS = 9 if ON_GPU else 3  # prompts of each length
PROMPTS = 30 if ON_GPU else 6  # at once
FLEET_S, FLEET_PER_S = (60.0, 8.0) if ON_GPU else (20.0, 0.5)
PARTS: dict[str, Callable[[Rig], Rows]] = {
    "lengths": lambda rig: lengths(rig, SIZES, ROUNDS),
    "at_once": lambda rig: at_once(rig, SIZE, PROMPTS),
    "streams": lambda rig: streams(rig, SIZE),
    "legs": lambda rig: legs(rig, SIZE, ROUNDS),
    "fleet": lambda rig: fleet(rig, FLEET_S, FLEET_PER_S),
}


def table(rows: Rows) -> str:
    """The rows of a part, in Markdown; a column for each name."""
    names = [name for name in rows[0] if name != "all"]
    return markdown.table(names, ([str(row.get(name, "")) for name in names] for row in rows))


def ratios(figures: dict[str, Rows]) -> list[str]:
    """What a reader would divide."""
    said = []
    found = {
        (r["tokens"], r["engine"], r["what"]): r["ttft_ms"] for r in figures.get("lengths", ())
    }
    for (tokens, engine, what), ttft_ms in found.items():
        against = {"computed": "none", "hit": "native"}[what]
        if engine != against and (other := found.get((tokens, against, what))):
            said.append(f"{tokens} tokens {what}, {engine} / {against}: {ttft_ms / other:.3f}")
    turns = {(r["engine"], r["turn"]): r["mean_ttft_ms"] for r in figures.get("at_once", ())}
    for (engine, turn), ttft_ms in turns.items():
        first = turns.get((engine, "first"), turns.get(("store", "first"), 0.0))
        if turn == "second":
            said.append(f"all at once, {engine}: {first / ttft_ms:.1f} times as fast as computed")
    if len(pair := figures.get("fleet", [])) == 2:
        shared, private = pair
        for name in ("computed", "mean_ttft_ms"):
            said.append(f"fleet, {name}, shared / private: {shared[name] / private[name]:.3f}")
    return said


def measure(rig: Rig, parts: Sequence[str]) -> dict[str, Rows]:
    """The rows of each part."""
    figures = {}
    for part in parts:
        print(f"== {part}", flush=True)
        figures[part] = PARTS[part](rig)
    return figures


def main() -> int:
    """Measure, print tables and ratios, and write all figures to --json."""
    parser = parser_of("benchmarks.offloading", __doc__)
    parser.add_argument("--vllm-python", type=Path, required=True, help="that can import vllm")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="parts")
    options = parser.parse_args()
    most = max(PROMPTS * SIZE, ROUNDS * sum(SIZES), streamed_tokens(SIZE)) + 2 * WARM_TOKENS
    host_bytes = most * TOKEN_BYTES * 6 // 5
    with tempfile.TemporaryDirectory(prefix="offloading-") as name, ExitStack() as stack:
        store = start_store(Path(name), memory=f"{host_bytes >> 20}MiB", flags=["--prefault"])
        stack.callback(store.stop)
        try:
            rig = Rig(options.vllm_python, Path(name), store, host_bytes)
            figures = measure(rig, options.only)
        except Wrong as wrong:
            print(wrong)
            return 1
    for part, rows in figures.items():
        print(f"\n{part}\n\n{table(rows)}")
    print("\n" + "\n".join(ratios(figures)))
    write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
