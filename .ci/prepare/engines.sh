#!/usr/bin/env bash
# The engines' environment, downloaded where the cache has none, and this checkout in it; what single tests need beside.
. "$(dirname "$0")/../lib.sh"
python=$(tests/vllm/make_env.sh)
python3 -m tests.vllm.install "$python"
tests/vllm/make_guidellm.sh "$python"
tests/vllm/make_nixl.sh
tests/vllm/make_next.sh "$python"
