"""The wheels in containers that have Python and nothing to compile with."""

import re
from pathlib import Path

import pytest
from tests.packaging.containers import IMAGES, no_engine, run_in
from tests.packaging.install_page import commands

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(400)]
COMPILERS = "cc c++ gcc g++ clang zig"


@pytest.fixture
def wheels(dist: Path) -> dict[Path, str]:
    """Where a container finds the wheels."""
    if reason := no_engine():
        pytest.skip(reason)
    return {dist: "/wheels:ro"}


@pytest.mark.parametrize("image", IMAGES)
def test_the_pages_commands_install_a_router_that_answers_right(
    image: str, wheels: dict[Path, str]
) -> None:
    script = f"""
        for compiler in {COMPILERS}; do
          if command -v $compiler; then exit 1; fi
        done
        python -m venv v
        . v/bin/activate
        {"; ".join(commands("bare container"))}
        pip check
        kvrouter --version
        pip uninstall --yes kvrouter
        python -c 'import kvrouter_store.client.blocking'
    """
    environment = {"PIP_FIND_LINKS": "/wheels", "PIP_ONLY_BINARY": "kvrouter,kvrouter-store"}
    said = run_in(image, script, mounts=wheels, environment=environment)
    assert re.search(r"\b(\d+) of \1 answers complete and right", said), said
    assert "No broken requirements found" in said


@pytest.mark.parametrize("image", IMAGES)
def test_an_engines_environment_gains_one_distribution(image: str, wheels: dict[Path, str]) -> None:
    script = """
        python -m venv v
        v/bin/pip freeze > before
        v/bin/pip install --quiet --no-index --find-links /wheels kvrouter-store
        v/bin/pip freeze | grep -vxFf before
    """
    gained = run_in(image, script, mounts=wheels).splitlines()
    assert [line.partition("==")[0] for line in gained] == ["kvrouter-store"]
