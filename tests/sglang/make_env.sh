#!/bin/sh
# Make (once) an environment with SGLang's own cache classes on a CPU and print the path of its python.
#   make_env.sh [FOLDER]     default: $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests
# Keyed by its pins; 2.7 GB. It holds no engine: SGLang's kernels have no build for CPUs in the index. SGLang is installed
# without its dependencies, of which only those below are imported; torchvision, which has no build for this torch, is
# replaced by stubs/. A requirement of the tests alone; nothing of kvrouter depends on it.
# Where pip's index holds no CPU build of torch, set PIP_EXTRA_INDEX_URL to one that does.
set -eu

SGLANG="sglang==0.5.23"
TORCH="torch==2.13.0"
IMPORTED="transformers==5.19.0 apache-tvm-ffi==0.1.11 xgrammar==0.2.7 numpy psutil requests orjson pyzmq msgspec pybase64
  pillow fastapi uvicorn packaging tqdm aiohttp einops pydantic setproctitle partial_json_parser interegular ipython dill
  cloudpickle python-multipart uvloop triton sentencepiece tiktoken compressed-tensors llguidance gguf scipy"
PYTHON="${PYTHON:-python3.11}"

. "$(dirname "$0")/../make_once.sh"

make() {
    "$PYTHON" -m venv "$made" >&2
    # shellcheck disable=SC2086
    "$made/bin/pip" install --quiet "$TORCH" $IMPORTED >&2
    "$made/bin/pip" install --quiet --no-deps "$SGLANG" >&2
}

make_once sglang "$SGLANG $TORCH $IMPORTED $($PYTHON -V)" "${1:-}"
echo "$made/bin/python"
