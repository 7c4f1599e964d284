"""The names that `kvrouter_store` offers: each is of a module, which is loaded on first use."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import kvrouter_store


def declared() -> Iterator[tuple[str, str]]:
    """The module and the name of each import that type checkers see."""
    assert kvrouter_store.__file__
    for node in ast.walk(ast.parse(Path(kvrouter_store.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvrouter_store."):
            yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize(("module", "name"), list(declared()))
def test_a_public_name_is_that_of_its_module(module: str, name: str) -> None:
    assert getattr(kvrouter_store, name) is getattr(import_module(module), name)
    assert name in dir(kvrouter_store)


def test_every_error_is_a_public_name() -> None:
    errors = vars(import_module("kvrouter_store.errors")).values()
    names = {one.__name__ for one in errors if isinstance(one, type)}
    assert names <= {name for _, name in declared()}


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'StoreServant'"):
        getattr(kvrouter_store, "StoreServant")  # noqa: B009 (a type checker would complain)


def test_importing_the_package_loads_none_of_its_modules() -> None:
    script = "import sys, kvrouter_store; print([m for m in sys.modules if 'kvrouter_store.' in m])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_clients_need_nothing_but_the_standard_library_and_the_core() -> None:
    """An engine's environment has its own versions of everything else."""
    script = (
        "import sys; before = set(sys.modules);"
        "import kvrouter_store.client.blocking, kvrouter_store.client.asyncio_client;"
        "import kvrouter_store.identity.chain;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    foreign = set(done.stdout.split()) - sys.stdlib_module_names - {"kvrouter_store"}
    assert foreign == set()
