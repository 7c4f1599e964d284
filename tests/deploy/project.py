"""A Compose project of deploy/, and what its services say."""

import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.patience import eventually

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


@dataclass(frozen=True)
class Project:
    """A project of its own, so that no other one on this machine is touched.

    Attributes:
        docker: the command.
        files: of Compose.
        profile: that is started; empty: none.
        environment: beside this process's own.
    """

    docker: str
    files: Sequence[Path]
    profile: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def compose(self, *words: str, check: bool = True) -> str:
        """What docker compose prints."""
        command = [self.docker, "compose", "-p", f"kvrouter-test-{self.profile}"]
        command += [word for file in self.files for word in ("-f", str(file))]
        command += ["--profile", self.profile] if self.profile else []
        done = subprocess.run(
            [*command, *words],
            env={**os.environ, "KVROUTER_PUBLISHED_PORT": "0", **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=800,
        )
        if check and done.returncode:
            pytest.fail(f"docker compose {' '.join(words)}:\n{done.stdout[-6000:]}")
        return done.stdout

    @contextmanager
    def up(self, *services: str) -> Iterator["Project"]:
        """All of it healthy, or these services and what they need; taken down at the end."""
        began = time.monotonic()
        try:
            self.compose("up", "--build", "--wait", "--wait-timeout", "400", *services)
            print(f"\ncompose up {self.profile} took {time.monotonic() - began:.0f} s")
            yield self
        except BaseException:
            print(self.compose("logs", "--tail", "30", check=False)[-8000:])
            raise
        finally:
            self.compose("down", "--volumes", "--timeout", "5", check=False)

    def address(self, service: str, port: int) -> str:
        """Where the service's port is published."""
        return self.compose("port", service, str(port)).strip()

    def inside(self, service: str, url: str) -> str:
        """What a service answers itself inside its container."""
        script = f"import urllib.request as r; print(r.urlopen({url!r}).read().decode())"
        return self.compose("exec", "-T", service, "python3", "-c", script)

    def series(self, service: str, name: str, label: str) -> dict[str, int]:
        """One metric of an engine by one of its labels."""
        pattern = re.compile(rf'^{name}\{{.*{label}="(\w+)".*\}} (\S+)$', re.MULTILINE)
        page = self.inside(service, "http://127.0.0.1:8000/metrics")
        return {key: int(float(n)) for key, n in pattern.findall(page)}


def complete(address: str, model: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """The answer to a completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"http://{address}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        decoded: dict[str, Any] = json.load(answer)
    return decoded


def wait_until(condition: Callable[[], object], patience_s: float = 60) -> None:
    """Return when the condition, which takes its time to ask, holds."""
    assert eventually(condition, patience_s), condition
