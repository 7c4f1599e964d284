"""The connector needs nothing that vLLM's environment lacks, and changes nothing in it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vllm.install import CHECKOUT, install_into

STORE = CHECKOUT / "store"
ENGINES_OWN = {"numpy", "torch", "vllm"}


def imported(module: str) -> set[str]:
    """The modules that a module of the store imports, at its top or in a function."""
    path = STORE / (module.replace(".", "/") + ".py")
    if not path.exists():
        path = STORE / module.replace(".", "/") / "__init__.py"
    if not path.exists():
        return set()
    found: set[str] = set()
    for node in walked(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def walked(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from walked(node)


def test_the_connector_reaches_only_the_standard_library_itself_and_the_engine() -> None:
    seen: set[str] = set()
    waiting = ["kvrouter_store.connectors.vllm.connector"]
    foreign: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for name in imported(module):
            top = name.partition(".")[0]
            if top == "kvrouter_store":
                waiting.append(name)
            elif top not in sys.stdlib_module_names | ENGINES_OWN:
                foreign.add(f"{module} imports {name}")
    assert "kvrouter_store.client.blocking" in seen
    assert not foreign


@pytest.mark.vllm
@pytest.mark.timeout(700)
def test_installing_it_changes_no_other_package(vllm_python: Path) -> None:
    before = others(vllm_python)
    if install_into(vllm_python) is not None:
        pytest.skip("nothing is installed: run without KVROUTER_VLLM_SITE")
    assert others(vllm_python) == before
    done = subprocess.run(
        [vllm_python, "-c", "import kvrouter_store; print(kvrouter_store.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd="/",
    )
    assert not Path(done.stdout.strip()).is_relative_to(CHECKOUT)


@pytest.mark.vllm
@pytest.mark.timeout(700)
def test_pip_has_nothing_to_say_against_it(vllm_python: Path, site: Path | None) -> None:
    if site is not None:
        pytest.skip("nothing is installed: run without KVROUTER_VLLM_SITE")
    complaints = pip(vllm_python, "check", fails=True)
    print(complaints)  # make_env.sh removes packages that vLLM requires and a CPU build cannot use
    assert "kvrouter" not in " ".join(complaints)


def others(python: Path) -> set[str]:
    """Names and versions of all that is installed, but for kvrouter itself."""
    listed = pip(python, "list", "--format=freeze")
    return {line for line in listed if not line.startswith("kvrouter")}


def pip(python: Path, *arguments: str, fails: bool = False) -> list[str]:
    """The lines that pip printed; `fails`: its exit status may be other than 0."""
    done = subprocess.run(
        [python, "-m", "pip", *arguments],
        capture_output=True,
        text=True,
        check=not fails,
        timeout=120,
    )
    return done.stdout.splitlines()
