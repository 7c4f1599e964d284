"""sbom.py FILE: write what a release contains, as CycloneDX JSON.

Libraries of the image by deploy/requirements.lock, and what is linked into the native modules.
Needs the packages of wheels/requirements.txt, with which the wheels were built.
"""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ziglang
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).resolve().parents[1]


def python_side() -> dict[str, Any]:
    """What cyclonedx-bom says of the locked requirements."""
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", "--output-reproducible"]
    command += [str(ROOT / "deploy/requirements.lock"), "--pyproject", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def library(name: str, release: str, licence: str, role: str, purl: str) -> dict[str, Any]:
    """A component."""
    return {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "version": release,
        "licenses": [{"license": {"id": licence}}],
        "description": role,
        "purl": purl,
    }


def native_side() -> list[dict[str, Any]]:
    """What the compiler links into both native modules."""
    zig = Path(ziglang.__file__).with_name("zig")
    told = subprocess.run([zig, "c++", "--version"], check=True, capture_output=True, text=True)
    llvm = told.stdout.split("clang version ", 1)[1].split()[0]
    nanobind = version("nanobind")
    linked = "linked statically into kvrouter._native and kvrouter_store._core"
    runtime = f"{linked}, with libc++abi and libunwind, by ziglang {version('ziglang')}"
    purl = f"pkg:pypi/nanobind@{nanobind}"
    return [
        library("nanobind", nanobind, "BSD-3-Clause", f"{linked}, with tsl::robin_map (MIT)", purl),
        {
            "type": "library",
            "bom-ref": "libc++",
            "name": "libc++",
            "version": llvm,
            "licenses": [{"expression": "Apache-2.0 WITH LLVM-exception"}],
            "description": runtime,
        },
    ]


def sbom() -> dict[str, Any]:
    """All of it; fails if it breaks CycloneDX's schema."""
    project = tomllib.loads((ROOT / "store/pyproject.toml").read_text())["project"]
    release = str(project["version"])
    found = python_side()
    found["metadata"]["component"]["version"] = release
    purl = f"pkg:pypi/kvrouter-store@{release}"
    store = library("kvrouter-store", release, "Apache-2.0", project["description"], purl)
    found["components"] = [store, *native_side(), *found["components"]]
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(found))
    assert wrong is None, wrong
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(sbom(), indent=2) + "\n")
