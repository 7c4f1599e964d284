"""Time to the first token of our connector beside other connectors, on real vLLM engines.

    python -m benchmarks.connectors --vllm-python PYTHON [--quick] [--json FILE]

Engines on a CPU (29M parameters, float32), one core each, with random prompts of 3,000 tokens. All
ratios are of pairs: the set-ups answer the same prompt one after the other, in the reverse order
for the next prompt, one request at a time. Medians and ratios have 90 % intervals.

- hit: the engine's own cache is reset before each prompt, so that its KV comes from the store. With
  our connector, the engine's host memory holds two of the eight prompts, and the others push each
  prompt out before its turn comes again; the store's own counter must show that it gave all blocks.
  LMCache runs with its multiprocess server. Mooncake runs as its connector does by default: the
  memory of the store is in the engine, so that its hits leave no process. The floor is an engine
  whose own cache has the prompt.
- no hit: new prompts, with our connector (which saves them) and without a connector.
- cold P/D: new prompts through `kvrouter serve`, a prefill and a decode engine; KV goes through our
  store, or from engine to engine by NixlConnector. Without network devices a thread of NIXL spins
  on the core of its engine, and both engines compute on the last core. Here the thread gets the
  lowest priority, each engine its own core, and they are stopped (SIGSTOP) while not asked.

The tokens of a prompt must be equal in all set-ups. By vLLM's counters, each hit must be one. A
prompt that a store has lost is counted, and asked once more. A peer that cannot be installed, does
not start or fails is named with its reason. Exit status 1 if a bar is missed (the whole interval
lies beyond it), or if tokens differ. Ten minutes on two quiet cores, with --quick four.
"""

import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.arguments import parser_of, write_figures
from benchmarks.connectors import groups
from benchmarks.connectors.judge import BARS, bar_lines, figures, table, verdict
from benchmarks.connectors.measure import Plan, Record
from benchmarks.connectors.rig import Rig

FULL = Plan(rounds=9, prompts=8, new_prompts=4, prompt_tokens=3000)
QUICK = Plan(rounds=2, prompts=4, new_prompts=2, prompt_tokens=3000)


def measure(python: Path, plan: Plan) -> Record:
    """All parts: engines of one group run at once, one group after the other."""
    record = Record()
    for group in (groups.alone, groups.handed_over):
        with tempfile.TemporaryDirectory(prefix="connectors-") as name, ExitStack() as stack:
            group(Rig(python, Path(name), stack), plan, record)
    return record


def main() -> int:
    """Measure and print; exit status 1 if a bar is missed or tokens differ."""
    parser = parser_of("benchmarks.connectors", __doc__)
    parser.add_argument("--vllm-python", type=Path, required=True, help="of tests/vllm/make_env.sh")
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as by Ctrl-C, with all engines
    plan = QUICK if options.quick else FULL
    record = measure(options.vllm_python, plan)
    found = figures(record.times)
    verdicts = {bar.name: verdict(bar, found) for bar in BARS}
    print(table(found), *bar_lines(verdicts, record.skipped), sep="\n")
    for name, prompts in record.misses.items():
        print(f"{name}: {prompts} prompts were not found at first, and asked once more")
    if record.different:
        print(f"tokens differ between set-ups for {record.different} prompts")
    document = {"plan": asdict(plan), "figures": found, "bars": verdicts, **asdict(record)}
    write_figures(options.json, document)
    return 1 if record.different or "MISSED" in verdicts.values() else 0


if __name__ == "__main__":
    sys.exit(main())
