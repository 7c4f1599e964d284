"""The rules of the house that no linter knows, held by a test."""

import ast
import gc
import re
import subprocess
from collections.abc import Iterator
from functools import cache
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


def tree_of(path: Path) -> ast.Module:
    gc.disable()  # CPython 3.11's parser fails if the collector ends a coroutine within it
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


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
        for function in functions(tree_of(path))
        if (lines := code_lines(function)) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_every_module_says_what_it_is() -> None:
    silent = [
        shown(path)
        for folder in ("router", "store", "examples", "benchmarks")
        for path in sources(".py", under=folder)
        if tree_of(path).body and ast.get_docstring(tree_of(path)) is None
    ]
    assert silent == []


def test_policies_know_no_event_loop() -> None:
    asynchronous = [
        shown(path, line)
        for path in sources(".py", under="router/kvrouter/routing/policies")
        for module, line in imported_modules(tree_of(path))
        if module.split(".")[0] in {"asyncio", "uvloop", "aiohttp"}
    ]
    assert asynchronous == []


def test_nothing_is_unpickled() -> None:
    pickled = [
        shown(path, line)
        for folder in ("router", "store", "examples")
        for path in sources(".py", under=folder)
        for module, line in imported_modules(tree_of(path))
        if module in {"pickle", "marshal", "shelve", "cloudpickle", "dill"}
    ]
    assert pickled == []


def test_only_config_reads_the_environment() -> None:
    readers = [
        shown(path, node.lineno)
        for folder in ("router", "store", "examples")
        for path in sources(".py", under=folder)
        if path.name not in {"settings.py", "environment.py"}
        for node in ast.walk(tree_of(path))
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
        for what, line in written(tree_of(path))
    ]
    assert found == []


LIFE_CYCLE = {"close", "release", "run", "shutdown", "start", "stop"}
SHARED_NAMES = {
    "kvrouter/access": {"follow"},
    "kvrouter/prefix": {"current", "forget", "match", "use", "wait"},
    "kvrouter/telemetry": {"family"},
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
        for node in ast.walk(tree_of(path)):
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


MAX_SLEEPS = 17
"""Goes down only. Conditions are waited for with tests/fakes/patience.py; what takes time has a
clock or an event that the test holds."""
TAKE_THEIR_TIME = {"chaos", "kubernetes", "lmcache", "sglang", "torch", "vllm"}
"""Folders of tests with real engines and clusters, which know no clock but the real one."""


def sleeps(tree: ast.AST) -> set[int]:
    """Lines that call `sleep` with more than 0, or `wait` for a part of a second to no end."""
    found, statements = set(), {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or len(call.args) + len(call.keywords) != 1:
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", None))
        (seconds,) = (*call.args, *(keyword.value for keyword in call.keywords))
        value = seconds.value if isinstance(seconds, ast.Constant) else None
        to_no_end = call in statements and isinstance(value, float) and value < 1
        if (name == "sleep" and value != 0) or (name == "wait" and to_no_end):
            found.add(call.lineno)
    return found


def test_tests_hardly_sleep() -> None:
    places = [
        shown(path, line)
        for path in sources(".py", under="tests")
        if path.relative_to(ROOT).parts[1] not in TAKE_THEIR_TIME and "soak" not in path.name
        for line in sorted(sleeps(tree_of(path)))
    ]
    assert len(places) <= MAX_SLEEPS, "\n".join(places)


WAY_TO_RUN = re.compile(
    r"run (with|without|as|on|in) \S|(apt-get|pip) install \S|\bmake \w|\.sh\b|^does not apply: \S"
)
"""In the reason of a skip: a command, a package or a machine with which the test runs."""
MARKS = ("pytest.mark.skip", "pytest.mark.skipif")


def text_of(node: ast.AST | None, names: dict[str, str]) -> str:
    """A string as far as it stands there, with the values of these names."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, names)
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    return str(node.value) if isinstance(node, ast.Constant) else ""


@cache
def strings(path: Path) -> dict[str, str]:
    """The strings that a module of tests has under a name, its own and imported ones."""
    found: dict[str, str] = {}
    for node in tree_of(path).body if path.exists() else []:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            theirs = strings(ROOT / f"{(node.module or '').replace('.', '/')}.py")
            names = {each.asname or each.name: theirs.get(each.name, "") for each in node.names}
            found |= {name: text for name, text in names.items() if text}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = text_of(node.value, found)
    return found


def reasons(path: Path) -> Iterator[tuple[int, str]]:
    """Why tests are skipped: of `pytest.skip(...)` and of the marks `skip` and `skipif`."""
    if "skip" not in path.read_text():
        return
    names = strings(path)
    for node in ast.walk(tree_of(path)):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and called in {"pytest.skip", *MARKS}:
            by_name = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            given = [*by_name, *(node.args if called not in MARKS[1:] else [])]
            yield node.lineno, text_of(given[0] if given else None, names)


def test_a_skip_says_what_would_run_the_test() -> None:
    silent = [
        f"{shown(path, line)}: {reason}"
        for path in sources(".py", under="tests")
        for line, reason in reasons(path)
        if not WAY_TO_RUN.search(reason)
    ]
    assert silent == []
