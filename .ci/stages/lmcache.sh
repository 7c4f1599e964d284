#!/usr/bin/env bash
# LMCache's multiprocess server over the store: its own loader, keys and memory, then two real vLLM engines on two servers.
# Its environment is that of the vLLM engines, with LMCache beside it; kept outside the checkout, keyed by its pins.
. "$(dirname "$0")/../lib.sh"
activate_dev
step "LMCache's environment"
KVROUTER_LMCACHE_PYTHON=$(tests/lmcache/make_env.sh "$(tests/vllm/make_env.sh)")
export KVROUTER_LMCACHE_PYTHON
python -m tests.vllm.install "$KVROUTER_LMCACHE_PYTHON"
step "tests/lmcache"
python -m pytest -m lmcache tests/lmcache --timeout 900 -o faulthandler_timeout=600 --durations 10 -v -s -rs
