#!/usr/bin/env bash
# LMCache's environment, downloaded where the cache has none, and this checkout in it.
. "$(dirname "$0")/../lib.sh"
python3 -m tests.vllm.install "$(tests/lmcache/make_env.sh "$(tests/vllm/make_env.sh)")"
