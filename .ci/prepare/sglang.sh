#!/usr/bin/env bash
# The environment with SGLang's cache classes, downloaded where the cache has none, and this checkout in it.
. "$(dirname "$0")/../lib.sh"
python=$(tests/sglang/make_env.sh)
python3 -m tests.vllm.install "$python"
