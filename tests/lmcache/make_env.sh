#!/bin/sh
# Make (once) an environment with LMCache beside that of a vLLM engine and print the path of its python.
#   make_env.sh VLLM_PYTHON     the python that tests/vllm/make_env.sh prints
# vLLM, torch and what else is there are taken from the engine's environment, into which nothing is installed; the pins name
# the few that LMCache needs beside them, without their dependencies, which would bring other versions. Keyed by the pins
# and by that environment; 150 MB. A requirement of the tests alone; nothing of kvrouter depends on it.
set -eu

PINS="lmcache==0.5.6 sortedcontainers==2.4.0 aiofile==3.12.3 caio==0.12.10"

python="$1"
engines="$(dirname "$(dirname "$python")")"
. "$(dirname "$0")/../make_once.sh"

make() {
    venv_beside "$python"
    # shellcheck disable=SC2086
    "$made/bin/pip" install --quiet --no-deps $PINS >&2
}

make_once lmcache-env "$PINS $engines" "$(dirname "$engines")"
echo "$made/bin/python"
