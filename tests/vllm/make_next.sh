#!/bin/sh
# Make (once) a folder with the Python code of a newer vLLM that has no CPU build yet, and print it.
#   make_next.sh PYTHON [FOLDER]     PYTHON: of make_env.sh; default folder: $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests
# Before the environment of PYTHON on PYTHONPATH, with that environment's compiled modules, it runs schedulers and
# connectors on a CPU, and no model. Keyed by its pin; 60 MB, of a download of 340 MB.
set -eu

VLLM="vllm==0.33.0"

python="$1"
. "$(dirname "$0")/../make_once.sh"

make() {
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$made/wheel" "$VLLM" >&2
    "$python" - "$made" <<'PYTHON'
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

site = Path(sys.argv[1])
(wheel,) = (site / "wheel").iterdir()
with ZipFile(wheel) as packed:
    packed.extractall(site, [name for name in packed.namelist() if name.endswith(".py")])
version = wheel.name.split("-")[1]
about = site / f"vllm-{version}+cpu.dist-info"  # vLLM takes its platform from this name
about.mkdir()
(about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
installed = Path(find_spec("vllm").origin).parent
for module in installed.glob("*.so"):
    shutil.copy(module, site / "vllm")
PYTHON
    rm -rf "$made/wheel"
}

make_once vllm-next "$VLLM $python" "${2:-}"
echo "$made"
