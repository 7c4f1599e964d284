#!/usr/bin/env bash
# SGLang's environment, downloaded where the cache has none, and this checkout in it.
. "$(dirname "$0")/../lib.sh"
python=$(tests/sglang/make_env.sh "$(tests/vllm/make_env.sh)")
python3 -m tests.vllm.install "$python"
