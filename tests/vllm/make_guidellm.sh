#!/bin/sh
# Make (once) an environment with guidellm beside that of a vLLM engine and print the path of its python.
#   make_guidellm.sh VLLM_PYTHON     the python that make_env.sh prints
# torch, transformers and what else is there are taken from the engine's environment, into which nothing is
# installed; the rest takes 350 MB. Keyed by the pin and by that environment. Only a test needs it.
set -eu

GUIDELLM="guidellm==0.8.1"

python="$1"
engines="$(dirname "$(dirname "$python")")"
. "$(dirname "$0")/../make_once.sh"

make() {
    venv_beside "$python"
    "$made/bin/pip" install --quiet --no-warn-conflicts "$GUIDELLM" >&2
}

make_once guidellm-env "$GUIDELLM $engines" "$(dirname "$engines")"
echo "$made/bin/python"
