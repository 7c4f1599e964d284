"""The rules of the house that no linter knows, held by a test."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 600  # a guard against monsters; most files stay below 400
MAX_FUNCTION_LINES = 50
SOURCE_SUFFIXES = {".py", ".cpp", ".h", ".c", ".sh"}
PROSE_SUFFIXES = {".md", ".toml", ".yml", ".yaml", ".txt"}
GENERATED = {"_core.pyi", "_native.pyi"}
PRIVATE_PATH = re.compile(r"(?<![\w.$}])/(home|root|work|Users)/\w")
VAGUE_FILES = {"utils", "util", "helpers", "common"}
VAGUE_NAMES = re.compile(r"^class \w*(Manager|Helper|Utils?)\b", re.MULTILINE)


def tracked_files() -> list[Path]:
    """What git tracks or would track; every file where there is no git (an unpacked sdist)."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode:
        paths = [p for p in ROOT.rglob("*") if "build" not in p.relative_to(ROOT).parts]
    else:
        paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def sources(*suffixes: str, under: str = "") -> list[Path]:
    """Tracked files with one of the suffixes, under a folder of the repository."""
    base = ROOT / under
    return [p for p in tracked_files() if p.suffix in suffixes and p.is_relative_to(base)]


def shown(path: Path, line: int | None = None) -> str:
    where = str(path.relative_to(ROOT))
    return f"{where}:{line}" if line else where


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the signature to the end, without the docstring: prose is not complexity."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def test_no_file_is_longer_than_one_idea() -> None:
    long = [
        f"{shown(path)}: {lines}"
        for path in tracked_files()
        if path.suffix in SOURCE_SUFFIXES and path.name not in GENERATED
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    ]
    assert long == []


def test_no_function_is_longer_than_a_screen() -> None:
    long = [
        f"{shown(path, function.lineno)} {function.name}: {lines}"
        for path in sources(".py")
        for function in functions(ast.parse(path.read_text()))
        if (lines := code_lines(function)) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_every_module_says_what_it_is() -> None:
    silent = [
        shown(path)
        for folder in ("router", "store", "examples", "benchmarks")
        for path in sources(".py", under=folder)
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_policies_know_no_event_loop() -> None:
    asynchronous = [
        shown(path, line)
        for path in sources(".py", under="router/kvrouter/routing/policies")
        for module, line in imported_modules(ast.parse(path.read_text()))
        if module.split(".")[0] in {"asyncio", "uvloop", "aiohttp"}
    ]
    assert asynchronous == []


def test_nothing_is_unpickled() -> None:
    pickled = [
        shown(path, line)
        for folder in ("router", "store", "examples")
        for path in sources(".py", under=folder)
        for module, line in imported_modules(ast.parse(path.read_text()))
        if module in {"pickle", "marshal", "shelve", "cloudpickle", "dill"}
    ]
    assert pickled == []


def test_only_config_reads_the_environment() -> None:
    readers = [
        shown(path, node.lineno)
        for folder in ("router", "store", "examples")
        for path in sources(".py", under=folder)
        if path.name not in {"settings.py", "environment.py"}
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("os", "environ"), ("os", "getenv")}
    ]
    assert readers == []


def test_names_say_what_a_thing_is() -> None:
    vague = [
        shown(path)
        for path in sources(".py", ".cpp", ".h")
        if VAGUE_NAMES.search(path.read_text()) or path.stem in VAGUE_FILES
    ]
    assert vague == []


def test_nothing_names_the_machine_it_was_written_on() -> None:
    guilty = [
        shown(path)
        for path in tracked_files()
        if path.suffix in SOURCE_SUFFIXES | PROSE_SUFFIXES or ".ci" in path.parts
        if PRIVATE_PATH.search(path.read_text(errors="replace"))
    ]
    assert guilty == []


def test_a_metric_is_registered_in_one_place() -> None:
    pattern = re.compile(r"""["'](kvrouter:[a-z_:]+)["']""")
    places: dict[str, list[str]] = {}
    for path in sources(".py", under="router"):
        for name in set(pattern.findall(path.read_text())):
            places.setdefault(name, []).append(shown(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


RECORDS = {"route", "timing", "outcome", "resources"}
"""What `RequestContext` keeps of a request: each changes by its own verbs alone."""


def written(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The attributes that are assigned to members of those names, or to locals called so."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            for part in parts:
                owner = part.value if isinstance(part, ast.Attribute) else None
                name = getattr(owner, "attr", getattr(owner, "id", None))
                if isinstance(part, ast.Attribute) and name in RECORDS:
                    yield f"{name}.{part.attr}", part.lineno


def test_the_records_of_a_request_have_one_writer() -> None:
    found = [
        f"{shown(path, line)}: {what}"
        for path in sources(".py", under="router/kvrouter/serving")
        if path.name != "context.py"
        for what, line in written(ast.parse(path.read_text()))
    ]
    assert found == []


LIFE_CYCLE = {"close", "release", "run", "shutdown", "start", "stop"}
SHARED_NAMES = {
    "kvrouter/access": {"follow"},
    "kvrouter/http": {"add"},
    "kvrouter/prefix": {"current", "forget", "match", "use", "wait"},
    "kvrouter/telemetry": {"family"},
    "kvrouter/tools": {"token"},
    "kvrouter_store/connectors": {"begin", "lookup", "of", "put", "take"},
    "kvrouter_store/identity": {"as_dict"},
    "kvrouter_store/tiers": {"load"},
}
"""Names that more than three classes of a package define: with one meaning, or because vLLM calls
them so. None joins."""


def classes(package: str) -> dict[str, tuple[set[str], set[str]]]:
    """The public methods and the bases of each class of a package."""
    found = {}
    tree = {"kvrouter": "router", "kvrouter_store": "store"}[package.partition("/")[0]]
    for path in sources(".py", under=f"{tree}/{package}"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {each.name for each in functions(ast.Module(node.body, []))}
                bases = {
                    name.id
                    for base in node.bases
                    for name in ast.walk(base)
                    if isinstance(name, ast.Name)
                }
                found[node.name] = {name for name in names if not name.startswith("_")}, bases
    return found


def owners(package: str) -> dict[str, set[str]]:
    """Which classes of a package define a name; those behind one seam count once."""
    known, found = classes(package), dict[str, set[str]]()
    bases = {base for _, more in known.values() for base in more}
    seams = {c: names for c, (names, more) in known.items() if "Protocol" in more or c in bases}
    for name, (methods, more) in known.items():
        for method in methods - LIFE_CYCLE:
            behind = (c for c in seams if c == name or c in more or seams[c] <= methods)
            seam = next((c for c in behind if method in seams[c]), name)
            found.setdefault(method, set()).add(seam)
    return found


def test_a_name_means_one_thing_in_a_package() -> None:
    folders = {p.parent.relative_to(ROOT).parts[1:3] for p in sources(".py", under="router")}
    folders |= {p.parent.relative_to(ROOT).parts[1:3] for p in sources(".py", under="store")}
    packages = {"/".join(parts) for parts in folders if len(parts) == 2 and parts[0] != "kvstore"}
    many = {p: {n for n, of in owners(p).items() if len(of) > 3} for p in packages}
    assert {package: names for package, names in many.items() if names} == SHARED_NAMES
