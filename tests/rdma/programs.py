"""Programs of kvrouter that a test starts, and what they count."""

import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

__all__ = ["begin", "metric"]

ROOT = Path(__file__).resolve().parent.parent.parent
URLS = re.compile(r"\b(http|kv)(://[\w.]+:\d+)")
PATIENCE_S = 60.0


def begin(programs: ExitStack, command: Sequence[str]) -> dict[str, str]:
    """Start `kvrouter COMMAND`; the URLs that it prints when it is ready, by their scheme.

    `patient-store` is a store that waits long for its tiers. They are killed when `programs` are
    closed.
    """
    patient = command[0] == "patient-store"
    program = (
        [sys.executable, "-m", "tests.fakes.patient_store", *command[1:]]
        if patient
        else [sys.executable, "-m", "kvrouter", *command]
    )
    process = programs.enter_context(
        subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    )
    programs.callback(process.kill)
    assert process.stdout is not None
    said = next((line for line in process.stdout if URLS.search(line)), "")
    assert said, f"kvrouter {' '.join(command)} has ended"
    return {scheme: scheme + place for scheme, place in URLS.findall(said)}


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of the series of that name with these labels, of a program that serves `url`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as page:
        lines = page.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    series = [line for line in lines if re.match(rf"{name}[{{ ]", line)]
    return sum(float(s.rsplit(" ", 1)[1]) for s in series if all(each in s for each in wanted))
