"""Which failed tests CI runs again, and what its summary says about them."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / ".ci"
pytestmark = pytest.mark.skipif(
    not CI.exists(), reason="no .ci: run in a clone, not a source distribution"
)
LISTED = "tests/unit/test_a.py::test_known_to_be_slow"
OTHER = "tests/unit/test_b.py::test_that_counts"


@pytest.fixture(scope="module")
def quarantine() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quarantine", CI / "quarantine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked(folder: Path, listed: list[str], failed: list[str]) -> subprocess.CompletedProcess[str]:
    """The answer of a copy of the script with a list of its own."""
    script = Path(shutil.copy(CI / "quarantine.py", folder))
    (folder / "quarantine.txt").write_text("# comment\n" + "\n".join(listed))
    cache = folder / "lastfailed"
    cache.write_text(json.dumps(dict.fromkeys(failed, True)))
    command = [sys.executable, str(script), str(cache)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_list_holds_at_most_five_existing_tests_with_reasons(quarantine: ModuleType) -> None:
    for name in quarantine.quarantined((CI / "quarantine.txt").read_text()):
        path, *_, function = name.split("::")
        assert re.search(rf"def {function}\(", (ROOT / path).read_text()), name


def test_a_listed_test_may_run_again_with_any_parameters(tmp_path: Path) -> None:
    done = asked(tmp_path, [f"{LISTED} waits for a disk"], [f"{LISTED}[a b]", LISTED])
    assert done.returncode == 0
    assert done.stdout.splitlines() == [LISTED, f"{LISTED}[a b]"]


def test_nothing_runs_again_where_another_test_failed(tmp_path: Path) -> None:
    done = asked(tmp_path, [f"{LISTED} waits for a disk"], [LISTED, OTHER])
    assert done.returncode == 1
    assert done.stdout == ""
    assert OTHER in done.stderr
    assert LISTED not in done.stderr


@pytest.mark.parametrize(
    ("listed", "complaint"),
    [
        ([LISTED], "no reason"),
        ([f"{LISTED}{number} a reason" for number in range(6)], "5 are allowed"),
    ],
)
def test_a_list_that_breaks_its_rules_lets_nothing_run_again(
    tmp_path: Path, listed: list[str], complaint: str
) -> None:
    done = asked(tmp_path, listed, [LISTED])
    assert done.returncode == 2
    assert complaint in done.stderr


def test_the_summary_names_what_passed_only_when_run_again(tmp_path: Path) -> None:
    (tmp_path / ".ci/stages").mkdir(parents=True)
    shutil.copy(CI / "run", tmp_path / ".ci/run")
    (tmp_path / ".ci/stages/tests.sh").write_text(f"echo 'again: {LISTED}'\n")
    (tmp_path / ".ci/stages/lint.sh").write_text("echo well\n")
    command = [str(tmp_path / ".ci/run"), "tests", "lint"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = done.stdout.split("=== summary")[1]
    assert re.search(rf"tests .* passed, only when run again: {LISTED}\n", summary)
    assert re.search(r"lint .* passed\n", summary)
