"""Today's version and an earlier one, which is built from this checkout's history.

What was built is kept under its commit, in $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests.
"""

import io
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EARLIER = "a918363"
"""Of 0.1.0: protocol 3 of the store, messages 1 of routers. The store's package is `kvstore`."""


class NoHistory(Exception):
    """The earlier commit cannot be read; the message says why."""


@dataclass(frozen=True)
class Version:
    """A version to run.

    Attributes:
        name: for the ids of tests.
        packages: the folder that holds its packages; None: they are installed here.
        main: where its command begins.
    """

    name: str
    packages: Path | None
    main: str

    @property
    def kvrouter(self) -> tuple[str, ...]:
        """The command `kvrouter`."""
        return self.python(f"from {self.main} import main; sys.exit(main())")

    def python(self, code: str) -> tuple[str, ...]:
        """A Python that imports this version, to run code with.

        Without `site`, no editable install stands before the folder.
        """
        if self.packages is None:
            return sys.executable, "-c", f"import sys; {code}"
        path = [str(self.packages), sysconfig.get_path("purelib")]
        return sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {path}; {code}"


def todays() -> Version:
    """The version of this checkout."""
    return Version("today's", None, "kvrouter.cli.main")


def earlier() -> Version:
    """The earlier version, which is built where it is not kept. Raises NoHistory."""
    default = Path.home() / ".cache/kvrouter-tests"
    cache = Path(os.environ.get("KVROUTER_TEST_CACHE", default))
    kept = cache / f"kvrouter-{EARLIER}-whole-{sysconfig.get_config_var('SOABI')}"
    if not kept.exists():
        sources = _sources()
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            _build(sources, Path(name)).rename(kept)
    return Version("an earlier", kept, "kvrouter.cli")


def _sources() -> bytes:
    """The earlier tree, as a tar archive."""
    found = subprocess.run(
        ["git", "-C", ROOT, "archive", EARLIER], capture_output=True, check=False
    )
    if found.returncode:
        why = found.stderr.decode(errors="replace").strip()
        raise NoHistory(f"this checkout's history does not reach {EARLIER}: {why}")
    return found.stdout


def _build(sources: bytes, work: Path) -> Path:
    """Build with this Python and its tools; returns a folder with it and all that it needs."""
    with tarfile.open(fileobj=io.BytesIO(sources)) as archive:
        archive.extractall(work / "tree", filter="data")
    pip, tools = [sys.executable, "-m", "pip"], Path(sys.executable).parent
    make = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*make, "--wheel-dir", work, work / "tree"],
        check=True,
        env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"},
    )
    (wheel,) = work.glob("*.whl")
    subprocess.run([*pip, "install", "--quiet", "--target", work / "packages", wheel], check=True)
    return work / "packages"
