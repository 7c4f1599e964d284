#!/usr/bin/env python3
"""smoke.py: bring docker-compose.yml up, ask it, kill each kind of container, take it all down.

Needs Docker with Compose; no GPU. While a prefill engine, a decode engine or the store is dead, and
once a killed router is back, every prompt must be answered. Prints a table. Exit status 1: an
answer was wrong, Compose failed, or something was left over.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROJECT = "kvrouter-smoke"
FILE = Path(__file__).with_name("docker-compose.yml")
PROMPT_TOKENS = 640
ANSWER_TOKENS = 8
PATIENCE_S = 60
"""For one answer, and for the return of what was killed."""


class Failure(Exception):
    """What went wrong, in one sentence."""


@dataclass(frozen=True)
class Answer:
    """Which engines answered a prompt, and how many of its tokens were not computed again."""

    prefill: str
    decode: str
    cached: int


def run(*command: str) -> str:
    """What a command prints; Failure with its last lines if it fails."""
    environment = os.environ | {"KVROUTER_PUBLISHED_PORT": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise Failure(f"{' '.join(command)}:\n{tail}")
    return done.stdout.strip()


def compose(*words: str) -> str:
    """Run docker compose on the project."""
    return run("docker", "compose", "-f", str(FILE), "-p", PROJECT, *words)


def up() -> None:
    """Start what does not run, and return when all of it is healthy."""
    compose("up", "--build", "--wait", "--wait-timeout", "300")


def ask(address: str, number: int) -> Answer:
    """Ask the router at the address about a prompt, another one for each number."""
    body = {
        "model": "sim",
        "prompt": list(range(number * PROMPT_TOKENS, (number + 1) * PROMPT_TOKENS)),
        "max_tokens": ANSWER_TOKENS,
    }
    request = urllib.request.Request(
        f"http://{address}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            headers, usage = reply.headers, json.load(reply)["usage"]
    except (OSError, ValueError, KeyError) as error:
        raise Failure(f"no answer: {error}") from error
    if (usage["prompt_tokens"], usage["completion_tokens"]) != (PROMPT_TOKENS, ANSWER_TOKENS):
        raise Failure(f"a wrong answer: {usage}")
    details = usage.get("prompt_tokens_details") or {}
    prefill, decode = (
        headers.get(f"x-kvrouter-{leg}", "").partition(":")[0] for leg in ("prefill", "decode")
    )
    return Answer(prefill, decode, details.get("cached_tokens", 0))


def row(step: str, *cells: object) -> None:
    """Print a line of the table."""
    print(f"{step:36}" + "".join(f"{cell!s:12}" for cell in cells), flush=True)


@contextmanager
def timed(step: str) -> Iterator[list[object]]:
    """Print a line about a step when it has ended, with what was put into the list."""
    cells: list[object] = []
    began = time.monotonic()
    yield cells
    row(step, f"{time.monotonic() - began:.2f}", *cells)


def answered(step: str, number: int) -> Answer:
    """Ask, and print who answered."""
    address = compose("port", "router", "8000")
    with timed(step) as cells:
        answer = ask(address, number)
        cells += [answer.decode, f"{answer.cached} of {PROMPT_TOKENS}"]
    return answer


def killed(service: str) -> None:
    """Kill the container of a service. Docker restarts what crashes, but not what it must kill."""
    compose("kill", "--signal", "KILL", service)


def story() -> None:
    """Everything between the first start and the end."""
    with timed("up"):
        up()
    first = answered("a prompt", 0)
    again = answered("the same again", 0)
    if again.cached < PROMPT_TOKENS // 2 or not first.prefill:
        raise Failure(f"reused of a known prompt: {again.cached} tokens; first answer: {first}")
    for number, service in enumerate((first.prefill, again.decode, "store"), 1):
        killed(service)
        answered(f"{service} killed: a new prompt", number)
        answered(f"{service} killed: the first one", 0)
        with timed(f"{service} back"):
            up()
    killed("router")
    with timed("router killed, and back"):
        up()
    answered("the first prompt", 0)


def left_over() -> list[str]:
    """Containers, networks and volumes of the project."""
    label = f"label=com.docker.compose.project={PROJECT}"
    kinds = (("ps", "-a"), ("network", "ls"), ("volume", "ls"))
    return [
        name for kind in kinds for name in run("docker", *kind, "-q", "--filter", label).split()
    ]


def down() -> None:
    """Take everything down; Failure if something stays."""
    with timed("down"):
        compose("down", "--volumes")
    if left := left_over():
        raise Failure(f"left over: {', '.join(left)}")


def main() -> int:
    """Run the story and always take everything down; the exit status."""
    row("step", "seconds", "decode", "reused")
    try:
        try:
            story()
        finally:
            down()
    except Failure as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
