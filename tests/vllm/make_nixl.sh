#!/bin/sh
# Make (once) a folder with NIXL for engines' PYTHONPATH and print it.
#   make_nixl.sh [FOLDER]     default: $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests
# Keyed by its pins; 250 MB. Without its dependencies, which would bring a torch that no engine here uses.
set -eu

PINS="nixl==1.5.1 nixl-cu12==1.5.1"
PYTHON="${PYTHON:-python3.11}"

. "$(dirname "$0")/../make_once.sh"

make() {
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install --quiet --no-deps --target "$made" $PINS >&2
}

make_once nixl "$PINS $($PYTHON -V)" "${1:-}"
echo "$made"
