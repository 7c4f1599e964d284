#!/bin/sh
# Make (once) an environment with Mooncake's store, its master included, and print the path of its python.
#   make_env.sh [FOLDER]     default: $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests
# Keyed by its pin; 150 MB. A requirement of the tests alone; nothing of kvrouter depends on it.
set -eu

MOONCAKE="mooncake-transfer-engine-non-cuda==0.3.13.post1"
PYTHON="${PYTHON:-python3.11}"

folder="${1:-${KVROUTER_TEST_CACHE:-$HOME/.cache/kvrouter-tests}}"
key=$(printf '%s' "$MOONCAKE $($PYTHON -V)" | sha256sum | cut -c1-16)
env="$folder/mooncake-$key"

mkdir -p "$folder"
exec 9>"$folder/mooncake.lock"
flock 9
if [ ! -f "$env/complete" ]; then
    rm -rf "$env"
    "$PYTHON" -m venv "$env" >&2
    "$env/bin/pip" install --quiet "$MOONCAKE" >&2
    touch "$env/complete"
fi
echo "$env/bin/python"
