"""docs/api.md names the clients that tests/clients runs, in the versions that are pinned there."""

import json
import re
from pathlib import Path

import pytest
from tests.clients.client import HERE
from tests.docs.pages import DOCS

TOLD = re.compile(r"`([@\w/-]+)` (\d[\d.]+\d)")
PINNED = re.compile(r'^# dependencies = \["([\w-]+)(?:\[\w+\])?==([\d.]+)"\]$', re.MULTILINE)
SCRIPTS = sorted(HERE.glob("python/with_*.py"))


def pinned(script: Path) -> tuple[str, str]:
    found = PINNED.search(script.read_text())
    assert found is not None
    return found[1], found[2]


def test_the_page_names_each_client_in_its_version() -> None:
    section = (DOCS / "api.md").read_text().partition("\n## Clients\n")[2].partition("\n## ")[0]
    node = json.loads((HERE / "node/package.json").read_text())["dependencies"]
    assert set(TOLD.findall(section)) == {*map(pinned, SCRIPTS), *node.items()}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_lock_holds_what_its_script_asks_for(script: Path) -> None:
    name, version = pinned(script)
    lock = script.with_suffix(".lock").read_text().splitlines()
    assert f"{name}=={version}" in lock
