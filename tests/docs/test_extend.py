"""docs/extend.md adds one of each kind: the product takes them as the page says, and it is right.

The page's files and lines go over the installed product (overlay.py); then its commands run.
"""

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import aiohttp
import pytest
from tests.contract.families.conftest import ids
from tests.docs.extended_suites import LinesBackend, LlamaCppEngine
from tests.docs.pages import DOCS, PROMPT, ROOT
from tests.fakes.patience import eventually
from tests.fakes.pd import PATIENCE_S, Network
from tests.fakes.store import chain_of
from tests.integration.tiers.test_nodes import BLOCK_BYTES, BLOCKS, Start, got, put, start

from kvrouter.engines.engine import Role
from kvrouter.tools.demo.children import KVROUTER, Children

__all__ = ["start"]
FENCE = re.compile(r"^```(python|diff|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PACKAGES = re.compile(r"^(router|store)/")
NAMES = {
    "A routing policy": "fewest_legs",
    "An engine family": "llamacpp",
    "A tier below a store node": "process",
    "A discovery source": "lines",
}
"""Of the examples, in the tests of their suites."""


@dataclass
class Example:
    """What a section of the page has: files and lines by their path, and commands."""

    files: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)


def examples() -> dict[str, Example]:
    """The sections by their titles."""
    _, *sections = (DOCS / "extend.md").read_text().split("\n## ")
    found = {section.partition("\n")[0]: Example() for section in sections}
    for example, section in zip(found.values(), sections, strict=True):
        for kind, text in FENCE.findall(section):
            if kind == "console":
                example.commands += [each.strip() for each in PROMPT.split(text)[1:]]
                continue
            first, _, rest = text.partition("\n")
            _, path = first.split()
            (example.files if kind == "python" else example.lines)[path] = rest
    return found


EXAMPLES = examples()
FILES = {path: text for each in EXAMPLES.values() for path, text in each.files.items()}
LINES = {path: text for each in EXAMPLES.values() for path, text in each.lines.items()}


def added(path: str, diff: str) -> str:
    """The file with the lines that begin with `+`, each beside its neighbours in the diff."""
    lines = (ROOT / path).read_text().splitlines()
    waiting: list[str] = []
    place: int | None = None
    for marked in diff.splitlines():
        mark, line = marked[:1], marked[1:]
        if mark == " ":
            assert lines.count(line) == 1, (path, line)
            place = lines.index(line) + 1
            lines[place - 1 : place - 1] = waiting
            place, waiting = place + len(waiting), []
        elif place is None:
            waiting.append(line)
        else:
            lines.insert(place, line)
            place += 1
    return "\n".join(lines) + "\n"


@pytest.fixture
def extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The changed files; every process that starts now imports them."""
    folder = tmp_path / "files"
    changed = FILES | {path: added(path, diff) for path, diff in LINES.items()}
    for path, text in changed.items():
        file = folder / PACKAGES.sub("", path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    shutil.copy(Path(__file__).with_name("overlay.py"), tmp_path / "sitecustomize.py")
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{before}" if before else str(tmp_path))
    return folder


def run(*command: str | Path) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def flags_of(title: str) -> list[str]:
    """Those of the command that uses the example, but for the addresses of engines."""
    kvrouter, _, *flags = shlex.split(EXAMPLES[title].commands[0])
    assert kvrouter == "kvrouter"
    return flags[: flags.index("--decode")] if "--decode" in flags else flags


def test_the_page_has_an_example_of_each_kind() -> None:
    assert EXAMPLES.keys() == NAMES.keys()
    for each in EXAMPLES.values():
        assert (len(each.files), len(each.lines), len(each.commands)) == (1, 1, 2)


def test_the_examples_have_the_style_of_the_product(extended: Path) -> None:
    ruff, ours = Path(sys.executable).with_name("ruff"), "['kvrouter', 'kvrouter_store']"
    settings = (ROOT / "pyproject.toml", f"lint.isort.known-first-party={ours}")
    configured = [word for each in settings for word in ("--config", each)]
    for command in (["check"], ["format", "--check"]):
        run(ruff, *command, "--no-cache", *configured, extended)


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("title", NAMES)
def test_an_example_passes_the_suite_of_its_kind(title: str) -> None:
    python, *words = shlex.split(EXAMPLES[title].commands[1])
    assert [python, *words[:2]] == ["python", "-m", "pytest"]
    plugin = ("-p", "tests.docs.extended_suites", "-p", "no:cacheprovider")
    said = run(sys.executable, *words, "-k", NAMES[title], "-q", *plugin)
    assert "passed" in said
    assert "skipped" not in said


@pytest.mark.usefixtures("extended")
def test_help_names_the_examples() -> None:
    command = [*KVROUTER, "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = " ".join(done.stdout.split())
    for text in ("fewest_legs: the", "llamacpp: llama.cpp.", "lines://FILE: "):
        assert text in said


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("family", [(), ("An engine family",)], ids=["detected", "named"])
async def test_a_router_finds_and_uses_engines_by_the_examples(
    family: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    titles = ("A routing policy", "A discovery source", *family)
    flags = chain.from_iterable(map(flags_of, titles))
    backend, network = LinesBackend(tmp_path), Network()
    async with AsyncExitStack() as open_now:
        engines = [LlamaCppEngine(network, "both") for _ in range(2)]
        for engine in engines:
            await engine.start()
            open_now.push_async_callback(engine.stop)
        await backend.name({})
        children = await open_now.enter_async_context(Children(tmp_path))
        router = await children.start("router", "serve", "--port", "0", *flags)
        http = await open_now.enter_async_context(aiohttp.ClientSession())
        for engine in engines:
            await backend.name({engine.address: Role.DECODE})
            async with asyncio.timeout(PATIENCE_S):
                while not engine.requests:
                    await (await http.post(f"{router.http}/v1/completions", json=ids())).read()
        assert children.logged(router).count("; llamacpp") == 2


@pytest.mark.usefixtures("extended")
def test_a_store_node_has_evicted_blocks_from_the_example(start: Start) -> None:
    flag, url = flags_of("A tier below a store node")[-2:]
    assert flag == "--tier"
    node = start(url, memory="8MiB")
    assert eventually(lambda: node.metric("kvstore:tier_up") == 1)
    put(node)
    written = BLOCKS * 2 * BLOCK_BYTES
    assert eventually(lambda: node.metric("kvstore:tier_bytes_total") > written)
    for seed in "bcdefg":
        put(node, chain_of(BLOCKS, seed))
    assert node.metric('kvstore:evictions_total{reason="capacity"}') > BLOCKS
    assert got(node) == BLOCKS
