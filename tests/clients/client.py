"""A client of another project: its script, its pins, and a process that runs its steps."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
STEPS = re.compile(r"^ *(?:await )?serve\(\{?(.*?)\}?\);?$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Script:
    """One of python/with_*.py and node/with_*.mjs."""

    path: Path

    @property
    def name(self) -> str:
        """As node-openai."""
        return f"{self.path.parent.name}-{self.path.stem.removeprefix('with_')}"

    @property
    def steps(self) -> list[str]:
        """What it can be asked to do."""
        found = STEPS.search(self.path.read_text())
        return re.findall(r"\w+\b(?!\.)", found[1]) if found else []

    def command(self, folder: Path) -> list[str | Path]:
        """What starts it, in the environment that its lock names; `folder` is for it alone."""
        if self.path.suffix == ".py":
            return [made("python", self.path.with_suffix(".lock")), self.path]
        node = Path(made("node"))
        shutil.copytree(self.path.parent, folder / "node")
        (folder / "node/node_modules").symlink_to(node / "node_modules")
        return [node / "bin/node", folder / "node" / self.path.name]


def made(*what: str | Path) -> str:
    """What make_env.sh prints."""
    done = subprocess.run(
        [HERE / "make_env.sh", *what], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


SCRIPTS = [
    Script(path)
    for pattern in ("python/with_*.py", "node/with_*.mjs")
    for path in sorted(HERE.glob(pattern))
]


class Client:
    """A process that runs a client's steps, as its user would before a server."""

    def __init__(self, command: Sequence[Any], url: str, log: IO[str]) -> None:
        own = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
        }
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log, text=True, env={**os.environ, **own}
        )
        self._log = Path(log.name)

    def do(self, step: str) -> Any:
        """Run a step: what it returns. AssertionError with the client's own words if it raises."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it ended, as the next line says
            print(step, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, self._log.read_text()[-3000:]
        result = json.loads(line)
        if isinstance(result, dict):
            assert "raised" not in result, result["raised"]
        return result

    def close(self) -> None:
        """Let it end."""
        try:
            self._process.communicate(timeout=20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
