#!/bin/sh
# Make (once) a folder with the Python code of a newer vLLM that has no CPU build yet, and print it.
#   make_next.sh PYTHON [FOLDER]     PYTHON: of make_env.sh; default folder: $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests
# Before the environment of PYTHON on PYTHONPATH, with that environment's compiled modules, it runs schedulers and
# connectors on a CPU, and no model. Keyed by its pin; 60 MB, of a download of 340 MB.
set -eu

VLLM="vllm==0.33.0"

python="$1"
folder="${2:-${KVROUTER_TEST_CACHE:-$HOME/.cache/kvrouter-tests}}"
key=$(printf '%s' "$VLLM $python" | sha256sum | cut -c1-16)
site="$folder/vllm-next-$key"

mkdir -p "$folder"
exec 9>"$folder/vllm-next.lock"
flock 9
if [ ! -f "$site/complete" ]; then
    rm -rf "$site"
    mkdir "$site"
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$site/wheel" "$VLLM" >&2
    "$python" - "$site" <<'PYTHON'
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
    rm -rf "$site/wheel"
    touch "$site/complete"
fi
echo "$site"
