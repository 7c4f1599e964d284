#!/usr/bin/env bash
# The router before stores of other projects: a real Mooncake master and LMCache coordinator, then real vLLM engines on each.
# Their environments are kept outside the checkout, keyed by their pins.
. "$(dirname "$0")/../lib.sh"
activate_dev
step "environments of Mooncake and LMCache"
KVROUTER_LMCACHE_PYTHON=$(tests/lmcache/make_env.sh "$(tests/vllm/make_env.sh)")
KVROUTER_MOONCAKE=$(benchmarks/connectors/make_peer.sh mooncake "$KVROUTER_LMCACHE_PYTHON")
LD_LIBRARY_PATH="$KVROUTER_MOONCAKE/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export KVROUTER_MOONCAKE KVROUTER_LMCACHE_PYTHON LD_LIBRARY_PATH
python -m tests.vllm.install "$KVROUTER_LMCACHE_PYTHON"
step "tests/contract/stores, tests/foreign"
python -m pytest -m foreign tests/contract/stores tests/foreign --timeout 900 -o faulthandler_timeout=600 --durations 10 -v -s -rs
