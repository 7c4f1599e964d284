# Sourced by scripts that make a folder once: an environment, or packages for PYTHONPATH.
# shellcheck shell=sh disable=SC2034,SC2154

# make_once NAME KEY [FOLDER]: sets `made` to FOLDER/NAME-HASH, with a hash of the key, usually pins. Calls `make`, which
# fills it, unless an earlier call did. One call at a time makes a folder of this name; the others wait.
# FOLDER: default $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests.
make_once() {
    cache="${3:-${KVROUTER_TEST_CACHE:-$HOME/.cache/kvrouter-tests}}"
    made="$cache/$1-$(printf '%s' "$2" | sha256sum | cut -c1-16)"
    mkdir -p "$cache"
    exec 9>"$cache/$1.lock"
    flock 9
    [ ! -f "$made/complete" ] || return 0
    rm -rf "$made"
    make
    touch "$made/complete"
}

# venv_beside PYTHON: makes an environment in $made that also finds what PYTHON's has, into which nothing is installed.
venv_beside() {
    "$1" -m venv "$made" >&2
    site=$("$made/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/engine.pth"
}
