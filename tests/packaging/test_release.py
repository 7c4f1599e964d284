"""What wheels/release.py refuses, how it prepares a version, and the sums that it writes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from wheels.release import sums

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = "# Changelog\n\n## Unreleased\n\n### Added\n\n- a thing\n\n## 0.1.0\n\n- the first\n"
MINE = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


class Checkout:
    """A repository that holds what a release looks at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "wheels").mkdir()
        (folder / "store").mkdir()
        shutil.copy(ROOT / "wheels/release.py", folder / "wheels")
        (folder / "store/pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
        (folder / "CHANGELOG.md").write_text(CHANGELOG)
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", *MINE, *arguments], cwd=self.folder, check=True)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "--quiet", "-m", "a change")

    def release(self, *arguments: str) -> str:
        """What the command says; "" if it did its work."""
        command = [sys.executable, str(self.folder / "wheels/release.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode in {0, 1}, done.stderr
        assert (done.returncode == 1) == bool(done.stderr)
        return done.stderr.strip()

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_prepare_gives_a_new_version_what_was_unreleased(checkout: Checkout) -> None:
    assert checkout.release("prepare", "0.2.0") == ""
    entries = "### Added\n\n- a thing\n\n## 0.1.0\n\n- the first\n"
    assert checkout.read("CHANGELOG.md") == (
        f"# Changelog\n\n## Unreleased\n\n## 0.2.0\n\n{entries}"
    )
    assert checkout.read("store/pyproject.toml") == '[project]\nversion = "0.2.0"\n'


def test_prepare_refuses_what_is_no_later_version_or_changes_nothing(checkout: Checkout) -> None:
    assert "no version" in checkout.release("prepare", "0.2")
    assert "not later than 0.1.0" in checkout.release("prepare", "0.1.0")
    assert "not later" in checkout.release("prepare", "0.0.9")
    assert checkout.release("prepare", "0.1.10") == ""
    assert "nothing under Unreleased" in checkout.release("prepare", "0.2.0")


def test_a_checkout_with_changes_is_not_released(checkout: Checkout) -> None:
    checkout.git("tag", "v0.1.0")
    (checkout.folder / "new").touch()
    assert "has changes" in checkout.release()


def test_only_the_tag_of_its_version_releases_a_commit(checkout: Checkout) -> None:
    assert "does not have the tag v0.1.0" in checkout.release()
    checkout.git("tag", "v0.2.0")
    assert "does not have the tag v0.1.0" in checkout.release()


def test_a_version_that_the_changelog_does_not_have_is_not_released(checkout: Checkout) -> None:
    (checkout.folder / "store/pyproject.toml").write_text('[project]\nversion = "0.3.0"\n')
    checkout.commit()
    checkout.git("tag", "v0.3.0")
    assert "no section 0.3.0" in checkout.release()


def test_the_rest_of_another_build_is_not_released(checkout: Checkout) -> None:
    (checkout.folder / ".gitignore").write_text("dist/\n")
    checkout.commit()
    checkout.git("tag", "v0.1.0")
    (checkout.folder / "dist").mkdir()
    (checkout.folder / "dist/old.whl").touch()
    assert "is not empty" in checkout.release("--python", sys.executable)


def test_the_projects_own_changelog_and_version_can_be_prepared(checkout: Checkout) -> None:
    for name in ("CHANGELOG.md", "store/pyproject.toml"):
        shutil.copy(ROOT / name, checkout.folder / name)
    before = checkout.read("CHANGELOG.md")
    assert checkout.release("prepare", "99.0.0") == ""
    assert checkout.read("CHANGELOG.md").replace("## 99.0.0\n\n", "", 1) == before
    assert 'version = "99.0.0"' in checkout.read("store/pyproject.toml")


def test_the_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    for name in ("kvrouter-0.1.0.tar.gz", "a.whl"):
        (tmp_path / name).write_text(name)
    (tmp_path / "SHA256SUMS").write_text(sums(tmp_path))
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert checked.stdout == "a.whl: OK\nkvrouter-0.1.0.tar.gz: OK\n"
