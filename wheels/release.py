"""Make a release of this checkout.

release.py prepare VERSION    set the version, and give it what CHANGELOG has under Unreleased
release.py [--python NAME]    make wheels, source distributions, SBOM and SHA256SUMS, in dist/

The second refuses a checkout with changes, without the tag vVERSION, or whose CHANGELOG does not
have the version. It takes CPython 3.11, and 3.12 or later, from PATH, or each --python.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "store/pyproject.toml"  # the only place of the version
CHANGELOG = ROOT / "CHANGELOG.md"
PROCESSORS = ("x86_64", "aarch64")
PYTHONS = (("python3.11",), ("python3.14", "python3.13", "python3.12"))
"""For the wheels of 3.11, and for those of every later version; of each, the first that is here."""
UNRELEASED = "## Unreleased\n"


class Refused(Exception):
    """There is nothing to release; the message says what to do."""


def version() -> str:
    """The version of this checkout."""
    return str(tomllib.loads(PROJECT.read_text())["project"]["version"])


def changes(of: str) -> str:
    """What CHANGELOG says of a version; "" if it does not have it."""
    found = re.search(
        rf"^## {re.escape(of)}\n(.*?)(?=^## |\Z)", CHANGELOG.read_text(), re.MULTILINE | re.DOTALL
    )
    return found[1].strip() if found else ""


def prepare(new: str) -> None:
    """Set the version and rename Unreleased to it. Raises Refused."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", new):
        raise Refused(f"{new} is no version: write X.Y.Z")
    if _numbers(new) <= _numbers(version()):
        raise Refused(f"{new} is not later than {version()}")
    if not changes("Unreleased"):
        raise Refused("CHANGELOG.md has nothing under Unreleased")
    text = CHANGELOG.read_text()
    CHANGELOG.write_text(text.replace(UNRELEASED, f"{UNRELEASED}\n## {new}\n", 1))
    project = PROJECT.read_text()
    PROJECT.write_text(project.replace(f'version = "{version()}"', f'version = "{new}"', 1))
    print(f"Now: git commit -am 'release: {new}' && git tag v{new} && make release")


def check() -> None:
    """Raise Refused unless this checkout is a release."""
    if git("status", "--porcelain"):
        raise Refused("the checkout has changes: commit them")
    tag = f"v{version()}"
    if tag not in git("tag", "--points-at", "HEAD").splitlines():
        raise Refused(f"HEAD does not have the tag {tag} of store/pyproject.toml's version")
    if not changes(version()):
        raise Refused(f"CHANGELOG.md has no section {version()}: release.py prepare writes it")


def build(pythons: Sequence[str], folder: Path) -> None:
    """Make everything, in a folder that does not exist or is empty. Raises Refused."""
    if folder.exists() and any(folder.iterdir()):
        raise Refused(f"{folder} is not empty: remove what is left of another build")
    for python in pythons:
        with tempfile.TemporaryDirectory() as name:
            _run(python, "-m", "venv", name)
            tools = Path(name) / "bin/python"
            _run(tools, "-m", "pip", "install", "--quiet", "-r", ROOT / "wheels/requirements.txt")
            for processor in PROCESSORS:
                _run(tools, ROOT / "wheels/build.py", "--target", processor, folder)
            _run(tools, ROOT / "wheels/sbom.py", folder / f"kvrouter-{version()}.cdx.json")
    (folder / "SHA256SUMS").write_text(sums(folder))


def sums(folder: Path) -> str:
    """A line for each file, as sha256sum prints it."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    digests = [hashlib.sha256(each.read_bytes()).hexdigest() for each in files]
    return "".join(f"{digest}  {each.name}\n" for digest, each in zip(digests, files, strict=True))


def pythons_here() -> list[str]:
    """A Python for each kind of wheels. Raises Refused if one is missing."""
    found = []
    for names in PYTHONS:
        here = [name for name in names if shutil.which(name)]
        if not here:
            raise Refused(f"no {' or '.join(names)} on PATH: name one with --python")
        found.append(here[0])
    return found


def git(*arguments: str) -> str:
    """What git prints."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _numbers(of: str) -> list[int]:
    return [int(number) for number in of.split(".")]


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def main(arguments: Sequence[str]) -> None:
    """Do what the arguments say. Raises Refused."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("command", nargs="*", metavar="prepare VERSION")
    parser.add_argument("--python", action="append", metavar="NAME")
    options = parser.parse_args(arguments)
    match options.command:
        case ["prepare", new]:
            prepare(new)
        case []:
            check()
            build(options.python or pythons_here(), ROOT / "dist")
            tag = f"kvrouter:{version()}"
            print(f"dist/ is complete. The image: docker build -f deploy/Dockerfile -t {tag} .")
        case _:
            parser.error("write prepare VERSION, or nothing")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as refused:
        sys.exit(f"release: {refused}")
