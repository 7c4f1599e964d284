#!/bin/sh
# Make (once) an environment with SGLang beside that of a vLLM engine and print the path of its python.
#   make_env.sh VLLM_PYTHON     the python that tests/vllm/make_env.sh prints
# torch, transformers and what else is there are taken from the engine's environment, into which nothing is installed; the
# pins name what SGLang imports beside them, without dependencies, which would bring kernels and other versions. The index
# has no kernels of SGLang for CPUs: on_cpu.py changes the few places that call a GPU's. stubs/ stands in for torchvision,
# which has no build for this torch, and for what else is imported and not used. Keyed by the pins, on_cpu.py and that
# environment; 300 MB. A requirement of the tests alone; nothing of kvrouter depends on it.
set -eu

SGLANG="sglang==0.5.23"
IMPORTED="orjson==3.13.0 zstandard==0.25.0 gguf==0.19.0 soundfile==0.14.0 torch_memory_saver==0.0.10"

python="$1"
here="$(dirname "$0")"
engines="$(dirname "$(dirname "$python")")"
. "$here/../make_once.sh"

make() {
    venv_beside "$python"
    # shellcheck disable=SC2086
    "$made/bin/pip" install --quiet --no-deps $SGLANG $IMPORTED >&2
    "$made/bin/python" "$here/on_cpu.py" "${SGLANG#*==}" >&2
}

make_once sglang-env "$SGLANG $IMPORTED $(sha256sum < "$here/on_cpu.py") $engines" "$(dirname "$engines")"
echo "$made/bin/python"
