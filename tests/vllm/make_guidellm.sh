#!/bin/sh
# Make (once) an environment with guidellm beside that of a vLLM engine and print the path of its python.
#   make_guidellm.sh VLLM_PYTHON     the python that make_env.sh prints
# torch, transformers and what else is there are taken from the engine's environment, into which nothing is
# installed; the rest takes 350 MB. Keyed by the pin and by that environment. Only a test needs it.
set -eu

GUIDELLM="guidellm==0.8.1"

python="$1"
engines="$(dirname "$(dirname "$python")")"
folder="$(dirname "$engines")"
key=$(printf '%s' "$GUIDELLM $engines" | sha256sum | cut -c1-16)
env="$folder/guidellm-env-$key"

exec 9>"$folder/guidellm-env.lock"
flock 9
if [ ! -f "$env/complete" ]; then
    rm -rf "$env"
    "$python" -m venv "$env" >&2
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/engine.pth"
    "$env/bin/pip" install --quiet --no-warn-conflicts "$GUIDELLM" >&2
    touch "$env/complete"
fi
echo "$env/bin/python"
