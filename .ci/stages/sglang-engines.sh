#!/usr/bin/env bash
# Real SGLang engines on the CPU behind the router, over the store, and with KV from engine to engine by Mooncake over TCP.
# What they need is kept outside the checkout, keyed by its pins.
. "$(dirname "$0")/../lib.sh"
activate_dev
step "the engines' environment, and Mooncake"
KVROUTER_SGLANG_PYTHON=$(tests/sglang/make_env.sh "$(tests/vllm/make_env.sh)")
KVROUTER_MOONCAKE=$(benchmarks/connectors/make_peer.sh mooncake "$KVROUTER_SGLANG_PYTHON")
export KVROUTER_SGLANG_PYTHON KVROUTER_MOONCAKE
step "tests/sglang"
python -m pytest -m sglang tests/sglang --ignore tests/sglang/test_hicache.py --timeout 600 -o faulthandler_timeout=500 --durations 10 -v -s -rs
