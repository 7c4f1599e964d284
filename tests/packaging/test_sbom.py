"""The SBOM of a release, written in a fresh environment."""

import json
import subprocess
import venv
from pathlib import Path

import pytest

import kvrouter

pytestmark = pytest.mark.packaging
ROOT = Path(__file__).resolve().parents[2]


def test_it_lists_every_locked_library_and_what_is_linked_into_the_modules(tmp_path: Path) -> None:
    venv.create(tmp_path / "v", with_pip=True)
    python = tmp_path / "v/bin/python"
    needed = ROOT / "wheels/requirements.txt"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", needed], check=True)
    subprocess.run([python, ROOT / "wheels/sbom.py", tmp_path / "sbom.json"], check=True)
    found = json.loads((tmp_path / "sbom.json").read_text())
    assert found["metadata"]["component"]["version"] == kvrouter.__version__
    listed = {(each["name"], each["version"]) for each in found["components"]}
    lock = (ROOT / "deploy/requirements.lock").read_text().splitlines()
    locked = {tuple(line.split()[0].split("==")) for line in lock if "==" in line}
    assert locked < listed
    assert ("kvrouter-store", kvrouter.__version__) in listed
    assert {"nanobind", "libc++"} < {name for name, _ in listed - locked}
