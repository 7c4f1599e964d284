"""The version is written down once, in store/pyproject.toml."""

import tomllib
from pathlib import Path

import kvrouter

ROOT = Path(__file__).resolve().parents[2]


def test_the_router_has_the_version_of_the_store() -> None:
    store = tomllib.loads((ROOT / "store/pyproject.toml").read_text())["project"]
    assert kvrouter.__version__ == store["version"]


def test_no_other_project_file_writes_it_down() -> None:
    router = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in router["dynamic"]
    assert "version" not in router
