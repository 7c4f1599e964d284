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
folder="$(dirname "$engines")"
key=$(printf '%s' "$PINS $engines" | sha256sum | cut -c1-16)
env="$folder/lmcache-env-$key"

exec 9>"$folder/lmcache-env.lock"
flock 9
if [ ! -f "$env/complete" ]; then
    rm -rf "$env"
    "$python" -m venv "$env" >&2
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/engine.pth"
    # shellcheck disable=SC2086
    "$env/bin/pip" install --quiet --no-deps $PINS >&2
    touch "$env/complete"
fi
echo "$env/bin/python"
