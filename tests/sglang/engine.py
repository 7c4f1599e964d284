"""A process with the caches of SGLang engines, and what it is told to do with them."""

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOADER = {
    "backend_name": "kvrouter",
    "module_path": "kvrouter_store.connectors.sglang",
    "class_name": "KVStoreHiCache",
}


class Raised(Exception):
    """What was told to the process raised this there."""


class Engines:
    """Engines by name in one process of SGLang's environment, told by lines of JSON."""

    def __init__(self, python: Path, site: Path | None, log: Path) -> None:
        self._log = log
        paths = ":".join(str(path) for path in (site, ROOT) if path is not None)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [python, HERE / "inside" / "engine.py"],
                env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        self._open: list[str] = []

    @property
    def log(self) -> str:
        """What the process has logged."""
        return self._log.read_text(errors="replace")

    def start(
        self,
        name: str,
        url: str,
        layout: str = "page_first",
        *,
        dtype: str = "bfloat16",
        **more: Any,
    ) -> "Engine":
        """An engine with a host pool of 512 pages.

        more: settings of the backend; `config` of the engine's rank, and its `flags`.
        """
        config, flags = more.pop("config", {}), more.pop("flags", {})
        extra = {**LOADER, "interface_v1": 1, "url": url, "weights_revision": "r1", **more}
        self.tell("open", name, extra, layout, dtype, config, flags)
        self._open.append(name)
        return Engine(self, name)

    def keys(self, seed: int, pages: int) -> list[str]:
        """The keys of the pages of a prompt, as SGLang makes them."""
        keys: list[str] = self.tell("keys", seed, pages)
        return keys

    def tell(self, *command: Any) -> Any:
        """Have a command done; its answer. Raises Raised where it raised."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self.log[-3000:]
        told = json.loads(line)
        if "error" in told:
            raise Raised(told["error"])
        return told["answer"]

    def close_all(self) -> None:
        """End the engines."""
        while self._open:
            self.tell("close", self._open.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


class Engine:
    """One engine in such a process."""

    def __init__(self, engines: Engines, name: str) -> None:
        self._engines, self._name = engines, name

    def set(self, keys: list[str], prefix: list[str] | None = None) -> bool:
        """Compute and store pages in one call; whether the store has them all."""
        done: bool = self._engines.tell("set", self._name, keys, prefix)
        return done

    def get(self, keys: list[str]) -> list[str]:
        """Load pages in one call; of each: 'right', 'wrong' or 'missing'."""
        found: list[str] = self._engines.tell("get", self._name, keys)
        return found

    def back_up(self, seed: int, pages: int) -> int:
        """Store a prompt by SGLang's own loop; how many pages it says are stored."""
        stored: int = self._engines.tell("back_up", self._name, seed, pages)
        return stored

    def prefetch(self, seed: int, pages: int) -> list[str]:
        """Look a prompt up and load it by SGLang's own loop; of each page found, what it is."""
        found: list[str] = self._engines.tell("prefetch", self._name, seed, pages)
        return found

    def exists(self, keys: list[str]) -> int:
        """How many leading pages there are."""
        found: int = self._engines.tell("exists", self._name, keys)
        return found

    def registered(self) -> bool:
        """Whether an RDMA device would register all of the pool, once, for any page."""
        found: bool = self._engines.tell("registered", self._name)
        return found

    def add_pool(self, kind: str) -> None:
        """Register another pool, as SGLang does for models that have one."""
        self._engines.tell("add_pool", self._name, kind)

    def clear(self) -> None:
        """As SGLang's request to clear the storage."""
        self._engines.tell("clear", self._name)

    def stats(self) -> dict[str, Any]:
        """What SGLang's metrics get."""
        found: dict[str, Any] = self._engines.tell("stats", self._name)
        return found
