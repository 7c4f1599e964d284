#!/bin/sh
# Make (once) a folder with NIXL for engines' PYTHONPATH and print it.
#   make_nixl.sh [FOLDER]     default: $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests
# Keyed by its pins; 250 MB. Without its dependencies, which would bring a torch that no engine here uses.
set -eu

PINS="nixl==1.5.1 nixl-cu12==1.5.1"
PYTHON="${PYTHON:-python3.11}"

folder="${1:-${KVROUTER_TEST_CACHE:-$HOME/.cache/kvrouter-tests}}"
key=$(printf '%s' "$PINS $($PYTHON -V)" | sha256sum | cut -c1-16)
site="$folder/nixl-$key"

mkdir -p "$folder"
exec 9>"$folder/nixl.lock"
flock 9
if [ ! -f "$site/complete" ]; then
    rm -rf "$site"
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install --quiet --no-deps --target "$site" $PINS >&2
    touch "$site/complete"
fi
echo "$site"
