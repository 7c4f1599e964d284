"""The wheels in containers that have Python and nothing to compile with."""

import re
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, commands
from tests.packaging.containers import IMAGES, no_engine, run_in

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(400)]
COMPILERS = "cc c++ gcc g++ clang zig"
CURL = Path(__file__).with_name("curl.py")
PIP = {"PIP_FIND_LINKS": "/wheels", "PIP_ONLY_BINARY": "kvrouter,kvrouter-store"}


@pytest.fixture
def wheels(dist: Path) -> dict[Path, str]:
    """Where a container finds the wheels."""
    if reason := no_engine():
        pytest.skip(f"{reason}: run with .ci/stages/packaging.sh as root")
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
        {"; ".join(commands(DOCS / "install.md", "bare container"))}
        pip check
        kvrouter --version
        pip uninstall --yes kvrouter
        python -c 'import kvrouter_store.client.blocking'
    """
    said = run_in(image, script, mounts=wheels, environment=PIP)
    assert re.search(r"\b(\d+) of \1 answers complete and right", said), said
    assert "No broken requirements found" in said


@pytest.mark.parametrize("image", IMAGES)
def test_the_quickstarts_second_prompt_comes_from_the_store(
    image: str, wheels: dict[Path, str]
) -> None:
    lines = "\n".join(commands(DOCS / "quickstart.md", "bare container"))
    script = f"python -m venv v\n. v/bin/activate\nPATH=/tools:$PATH\n{lines}\n"
    mounts = {**wheels, CURL: "/tools/curl:ro"}
    said = run_in(image, script, mounts=mounts, environment=PIP)
    assert re.findall(r'_details":\{"cached_tokens":(\d+)', said) == ["0", "512"], said


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
