#!/usr/bin/env bash
# The engines' environment and vLLM's tests, downloaded where the cache has none, and this checkout in it.
. "$(dirname "$0")/../lib.sh"
python=$(tests/vllm/make_env.sh)
python3 -m tests.vllm.install "$python"
tests/vllm/make_entrypoints.sh "$python"
