"""What must hold on a GPU before KV may go from there into the store.

    python -m benchmarks.cuda [--only NAME ...] [--json FILE]

Each question gets a verdict, and a process of its own, which may end badly: an error of CUDA ends
all work of its process. Needs torch with CUDA and a checkout; nothing has to be compiled. Eight
minutes at most. Exit status 2 without a GPU, 1 if an answer is no: except for the last two, which
tell whether a shorter way, from the GPU into the store's memory, could be built.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.arguments import parser_of, write_figures

DEADLINE_S = 65.0  # of one question: all end within eight minutes
QUESTIONS = {
    "exact": "does every byte arrive, for pages of all sizes?",
    "order": "does a copy take the bytes of its place in the queue?",
    "speed": "is the ring nearly as fast as a plain pinned copy?",
    "overlap": "does computing go on beside copies?",
    "sticky": "is nothing copied after an error of the device?",
    "registration": "may the GPU copy to and from the store's own memory?",
    "killed": "does the GPU stop writing when its process is killed?",
}
"""Each name is that of a module with a function `check`."""
DECIDING = ("registration", "killed")
"""What is built today needs no yes to these."""


def answer(name: str) -> dict[str, Any]:
    """One answer, of this process."""
    from importlib import import_module  # noqa: PLC0415

    from benchmarks.cuda.gpu import CudaGpu  # noqa: PLC0415 (needs torch)

    return asdict(import_module(f"benchmarks.cuda.{name}").check(CudaGpu()))


def asked(name: str) -> dict[str, Any]:
    """One answer, of a process of its own; no where that fails."""
    command = [sys.executable, "-m", "benchmarks.cuda", "--answer", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"passed": False, "says": f"no answer within {DEADLINE_S:g} s", "figures": {}}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    says = f"ended with status {done.returncode}: {reason}"
    return {"passed": False, "says": says, "figures": {}}


def machine() -> dict[str, Any]:
    """What answers. SystemExit with the remedy where there is no GPU."""
    try:
        import torch  # noqa: PLC0415 (its absence is an answer)
    except ImportError:
        sys.exit(_refused("install torch with CUDA: it is missing"))
    if not torch.cuda.is_available():
        sys.exit(_refused("run this on a machine with a GPU: torch finds none"))
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def _refused(why: str) -> int:
    print(f"benchmarks.cuda: {why}", file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask, print, and write --json."""
    parser = parser_of("benchmarks.cuda", __doc__)
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=[*QUESTIONS])
    parser.add_argument("--answer", choices=QUESTIONS, help="answer in this process, as JSON")
    options = parser.parse_args(arguments)
    if options.answer:
        gc.disable()  # see `sticky`: what is left of a failed copier must not be freed
        print(json.dumps(answer(options.answer)), flush=True)
        os._exit(0)
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    answers = {}
    for name in options.only:
        answers[name] = {"question": QUESTIONS[name], **asked(name)}
        verdict = "yes" if answers[name]["passed"] else "NO"
        print(f"{verdict:4}{name}: {QUESTIONS[name]} {answers[name]['says']}", flush=True)
    write_figures(options.json, {"machine": about, "answers": answers})
    needed = [found["passed"] for name, found in answers.items() if name not in DECIDING]
    return 0 if all(needed) else 1


if __name__ == "__main__":
    sys.exit(main())
