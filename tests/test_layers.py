"""Imports run one way: a package imports only packages below it, and packages never form a ring."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the lowest layer to the highest. Packages in one line do not import each other.
ROUTER = """
errors
options
http
telemetry
redis
openai
credentials
engines
membership
prefix
routing
fates
access
admission
serving
canary replicas
control
app
tools
cli
""".strip().splitlines()
STORE = """
descriptors errors log system_errors free_memory events
identity
connection
rdma
client
connectors tensors tiers
node
""".strip().splitlines()
# What each folder of csrc may include, besides itself.
NATIVE = {
    "base": "",
    "digest": "base",
    "wire": "base digest",
    "memory": "base digest wire",
    "table": "base digest wire memory",
    "disk": "base digest wire memory table",
    "net": "base digest wire memory table",
    "node": "base digest wire memory table disk net",
    "server": "base digest wire memory table disk net node",
    "client": "base digest wire memory net",
    "router": "base digest",
    "bindings": "base digest wire memory table disk net node server client router",
}
TREES = {"kvrouter": ROOT / "router", "kvrouter_store": ROOT / "store"}
RANKS = {
    f"{tree}.{name}": rank
    for tree, layers in (("kvrouter", ROUTER), ("kvrouter_store", STORE))
    for rank, line in enumerate(layers)
    for name in line.split()
}


def modules() -> dict[str, Path]:
    """Every Python module of the product by its dotted name."""
    found = {}
    for tree, root in TREES.items():
        for path in (root / tree).rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, for types alone and within functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path} imports by a relative name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole in MODULES or alias.name in {"_core", "_native"}
                yield whole if is_module else node.module


def top(module: str) -> str:
    """The layer of a module: its tree and the first name below."""
    return ".".join(module.split(".")[:2])


def package(module: str) -> str:
    """The folder of a module; a module that lies beside the packages stands for itself."""
    is_package = MODULES[module].name == "__init__.py"
    folder = module.rpartition(".")[0]
    return module if is_package or folder in TREES else folder


def test_every_package_has_a_layer() -> None:
    here = {top(module) for module in MODULES} - {"kvrouter", "kvrouter_store"}
    assert here - {"kvrouter.__main__"} == set(RANKS)


def test_a_module_imports_only_layers_below_its_own() -> None:
    wrong = []
    for module, path in MODULES.items():
        for target in imported(path):
            mine, theirs = top(module), top(target)
            if mine == theirs or theirs not in RANKS or mine not in RANKS:
                continue
            (my_tree, _), (their_tree, _) = mine.split("."), theirs.split(".")
            above = my_tree == their_tree and RANKS[theirs] >= RANKS[mine]
            if above or (my_tree == "kvrouter_store" and their_tree == "kvrouter"):
                wrong.append(f"{module} -> {target}")
    assert wrong == []


def test_packages_form_no_ring() -> None:
    edges: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        targets = {package(target) for target in imported(path) if target in MODULES}
        edges.setdefault(package(module), set()).update(targets - {package(module)})
    while free := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for name in free:
            del edges[name]
    assert edges == {}, "these packages import each other"


@pytest.mark.parametrize("folder", NATIVE)
def test_a_folder_of_csrc_includes_only_those_below_it(folder: str) -> None:
    allowed = {folder, *NATIVE[folder].split()}
    wrong = [
        f"{path.relative_to(ROOT)}: {header}"
        for path in (ROOT / "csrc" / folder).rglob("*")
        if path.suffix in {".h", ".cpp"}
        for header in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
        if header.split("/")[0] not in allowed
    ]
    assert wrong == []


def test_every_folder_of_csrc_has_a_layer() -> None:
    folders = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert folders - {"tests", "fuzz"} == set(NATIVE)


def test_only_bindings_know_python() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in {".h", ".cpp"} and "bindings" not in path.parts
        if re.search(r"#include <(nanobind|Python\.h)", path.read_text())
    ]
    assert wrong == []


def test_no_folder_of_the_product_is_crowded() -> None:
    crowded = {}
    for base, suffixes, most in (
        (ROOT / "router/kvrouter", {".py"}, 21),
        (ROOT / "store/kvrouter_store", {".py"}, 21),
        (ROOT / "csrc", {".h", ".cpp"}, 28),
    ):
        for folder in (base, *(path for path in base.rglob("*") if path.is_dir())):
            files = [path for path in folder.iterdir() if path.suffix in suffixes]
            if len(files) > most and "tests" not in folder.parts:
                crowded[str(folder.relative_to(ROOT))] = len(files)
    assert crowded == {}
