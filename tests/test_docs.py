"""What the pages say is true: names exist, links lead somewhere, flags are taken, commands run."""

import ast
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
LINK = re.compile(r"\[[^\]]+\]\(([^)#:]*)(?:#([^)]+))?\)")
FLAG_ROW = re.compile(r"^(?:\||-) (`--[^|:(]+)", re.MULTILINE)
OTHERS = re.compile(r"<!-- flags of others -->.*?<!-- end -->", re.DOTALL)
FLAG = re.compile(r"--[a-z][a-z-]*")
VARIABLE = re.compile(r"\bKVROUTER_[A-Z_]*[A-Z]\b")
MESSAGE = re.compile(r"^- `([^`]+)`", re.MULTILINE)
CPP_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND_LINE = re.compile(r"^\$? ?kvrouter ((?:key|config) \w+|\w+)(.*)$", re.MULTILINE)
GENERATED = "<!-- Written by "
COLUMNS = 100
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
    lines = text.replace("\\\n", " ").splitlines()
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    prompted = [line[2:] for line in lines if line.startswith("$ ")]
    return prompted or lines


def runnable() -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}:{number}", "\n".join(commands(text)))
        for page in PAGES
        for number, (language, words, text) in enumerate(fences(page))
        if language in {"console", "sh"} and words == "runnable"
    ]


def anchors(page: Path) -> set[str]:
    """Where links into a page may lead: its headings, as GitHub names them, and its `<a id>`s."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@cache
def sources() -> str:
    """Everything that may read a variable of the environment."""
    kinds = {".py", ".sh", ".yml", ".yaml", ""}
    return "".join(
        path.read_text()
        for folder in ("router", "store", "examples", "tests", "benchmarks", "deploy", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in kinds and path.is_file() and "__pycache__" not in path.parts
    )


@cache
def texts_of_the_product() -> frozenset[str]:
    """Every string of the product, C++ and Python; the pieces of f-strings each by itself."""
    python = {
        node.value
        for package in ("router/kvrouter", "store/kvrouter_store")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    native = {
        text
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in {".cpp", ".h"}
        for text in CPP_STRING.findall(re.sub(r'"\s*\n\s*"', "", path.read_text()))
    }
    return frozenset(python | native)


@BY_PAGE
def test_names_in_a_page_exist_in_the_code(page: Path) -> None:
    for dotted in NAME.findall(page.read_text()):
        resolve(dotted)


@BY_PAGE
def test_links_and_images_of_a_page_lead_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        found = page.parent / target.strip() if target else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_the_first_page_leads_to_every_other_one() -> None:
    index = ROOT / "docs/README.md"
    linked = {index.parent / target for target, _ in LINK.findall(index.read_text()) if target}
    assert [page.name for page in PAGES if page.parent == index.parent and page != index] == [
        page.name for page in PAGES if page in linked and page.parent == index.parent
    ]


@BY_PAGE
def test_flags_in_a_page_are_taken_by_the_command(page: Path) -> None:
    text = page.read_text()
    inline = "\n".join(re.findall(r"`(kvrouter [^`]*--[^`]+)`", FENCE.sub("", text)))
    blocks = [block for language, _, block in fences(page) if language in {"console", "sh", ""}]
    for block in [*blocks, inline]:
        for command, arguments in COMMAND_LINE.findall(block.replace("\\\n", " ")):
            flags = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", arguments))
            assert flags <= flags_of(command), (command, flags - flags_of(command))


@BY_PAGE
def test_flags_that_begin_a_row_or_an_item_are_settings(page: Path) -> None:
    settings = set(FLAG.findall((ROOT / "docs/configuration.md").read_text()))
    text = OTHERS.sub("", page.read_text())
    named = {flag for row in FLAG_ROW.findall(text) for flag in FLAG.findall(row)}
    assert {flag.replace("--no-", "--") for flag in named} <= settings


@BY_PAGE
def test_variables_in_a_page_are_read_by_something(page: Path) -> None:
    known = sources() + (ROOT / "docs/configuration.md").read_text()
    assert {each for each in VARIABLE.findall(page.read_text()) if each not in known} == set()


def test_the_places_that_contributing_names_are_there() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Where is it?", 1)[1]
    places = re.findall(r"\| `([\w/.]+)`: `(\w+)` \|", table)
    assert len(places) == 10
    assert [
        (path, name)
        for path, name in places
        if not re.search(rf"\b{name}\b", (ROOT / path).read_text())
    ] == []


def test_messages_in_the_list_of_errors_are_those_of_the_code() -> None:
    text = (ROOT / "docs/store.md").read_text().split("\n## Errors\n", 1)[1]
    pieces = [piece.strip() for row in MESSAGE.findall(text) for piece in row.split("...")]
    assert len(pieces) > 10
    said = "\0".join(texts_of_the_product())
    assert [piece for piece in pieces if piece not in said] == []


@BY_PAGE
def test_lines_of_a_page_are_short_but_for_tables_and_addresses(page: Path) -> None:
    text = page.read_text()
    long = [line for line in text.splitlines() if len(line) > COLUMNS and GENERATED not in text]
    assert [line for line in long if not line.startswith(("|", "![")) and "://" not in line] == []


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
