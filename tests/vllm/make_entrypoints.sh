#!/bin/sh
# Make (once) a folder with vLLM's own tests of its HTTP endpoints, and an environment beside that of the engines that runs
# them; print the folder. Its python is bin/python.
#   make_entrypoints.sh PYTHON [FOLDER]     PYTHON: of make_env.sh; default folder: $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests
# Keyed by its pins and that environment; 120 MB, of a download of 60 MB. vLLM's source distribution has the tests, its wheels
# have not; pip only gives it out after it has asked vLLM's build for its metadata.
set -eu

VLLM="vllm==0.32.0"
TOOLS="pytest==8.4.2 pytest-asyncio==1.2.0 pytest-timeout==2.4.0 tblib==3.2.2 schemathesis==4.32.5"
BUILD="setuptools==80.9.0 setuptools-scm==9.2.2 setuptools-rust==1.13.0 wheel==0.45.1"

python="$1"
engines="$(dirname "$(dirname "$python")")"
. "$(dirname "$0")/../make_once.sh"

make() {
    venv_beside "$python"
    # shellcheck disable=SC2086
    "$made/bin/pip" install --quiet --no-warn-conflicts $TOOLS $BUILD >&2
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE="${VLLM#*==}" "$made/bin/pip" download --quiet --no-deps \
        --no-build-isolation --no-binary vllm --dest "$made/source" "$VLLM" >&2
    tar --extract --gzip --file "$made/source/"*.tar.gz --directory "$made" --strip-components 1 --wildcards "*/tests"
    rm -r "$made/source"
}

make_once vllm-entrypoints "$VLLM $TOOLS $BUILD $engines" "${2:-}"
echo "$made"
