"""What the pages say is true: names exist, links lead somewhere, flags are taken, commands run."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAME = re.compile(r"`((?:kvrouter|kvrouter_store)(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)#:]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND_LINE = re.compile(r"^\$? ?kvrouter ((?:bench|key|config) \w+|\w+)(.*)$", re.MULTILINE)
BY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def fences(page: Path) -> Iterator[tuple[str, str, str]]:
    """Language, remaining words of the opening line, and text of every fenced block."""
    for match in FENCE.finditer(page.read_text()):
        yield match[1], match[2].strip(), match[3]


def resolve(dotted: str) -> object:
    """The module, class or function that a dotted name means. Raises where there is none."""
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if error.name not in {".".join(parts[:end]) for end in range(1, split + 1)}:
                raise
            continue
        for attribute in parts[split:]:
            found = getattr(found, attribute)
        return found
    raise AttributeError(dotted)


def commands(text: str) -> list[str]:
    """Command lines of a block: those after `$ `, or every line where none has a prompt."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    prompted = [line[2:] for line in lines if line.startswith("$ ")]
    return prompted or lines


def runnable() -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}:{number}", "\n".join(commands(text)))
        for page in PAGES
        for number, (language, words, text) in enumerate(fences(page))
        if language in {"console", "sh"} and words == "runnable"
    ]


@BY_PAGE
def test_names_in_a_page_exist_in_the_code(page: Path) -> None:
    for dotted in NAME.findall(page.read_text()):
        assert resolve(dotted) is not None or dotted, dotted


@BY_PAGE
def test_links_of_a_page_lead_to_a_file(page: Path) -> None:
    broken = [
        target
        for target in LINK.findall(page.read_text())
        if not (page.parent / target.strip()).exists()
    ]
    assert broken == []


@BY_PAGE
def test_flags_in_a_page_are_taken_by_the_command(page: Path) -> None:
    for language, _, text in fences(page):
        if language not in {"console", "sh", ""}:
            continue
        for command, arguments in COMMAND_LINE.findall(text.replace("\\\n", " ")):
            flags = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", arguments))
            assert flags <= flags_of(command), (command, flags - flags_of(command))


@cache
def flags_of(command: str) -> set[str]:
    done = subprocess.run(
        [Path(sys.executable).with_name("kvrouter"), *command.split(), "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (command, done.stderr)
    return set(re.findall(r"--[a-z][a-z-]*", done.stdout))


@pytest.mark.parametrize(("where", "script"), runnable(), ids=lambda value: str(value)[:40])
def test_a_block_marked_runnable_runs(where: str, script: str, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{where}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def test_the_readme_offers_two_commands_and_ci_runs_exactly_those() -> None:
    text = (ROOT / "README.md").read_text().split("<!-- two commands -->", 1)[1]
    block = FENCE.search(text)
    assert block is not None
    assert len(commands(block[3])) == 2
    script = 'source .ci/lib.sh; readme_command 1; readme_command 2; [ -z "$(readme_command 3)" ]'
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == commands(block[3])
    for stage, number in (("demo", 1), ("tests", 2)):
        assert f"$(readme_command {number})" in (ROOT / f".ci/stages/{stage}.sh").read_text()


def test_the_life_of_a_request_is_ten_steps_that_name_their_functions() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    life = text.split("## The life of a request", 1)[1].split("\n## ", 1)[0]
    steps = re.split(r"^(\d+)\. ", life, flags=re.MULTILINE)[1:]
    assert [int(number) for number in steps[::2]] == list(range(1, 11))
    for number, step in zip(steps[::2], steps[1::2], strict=True):
        assert NAME.search(step), f"step {number} names no function"


def test_the_tree_names_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    tree = text.split("## The tree", 1)[1].split("\n## ", 1)[0]
    missing = [
        str(folder.relative_to(ROOT))
        for base in ("router/kvrouter", "store/kvrouter_store", "csrc")
        for folder in (ROOT / base).glob("*/")
        if folder.name not in {"__pycache__", "tests", "fuzz"} and any(folder.iterdir())
        if f"`{folder.name}/`" not in tree
    ]
    assert missing == []


def test_files_in_the_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`((?:csrc|router|store|tests|benchmarks)/[\w/.]+\.\w+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
