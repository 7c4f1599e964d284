#!/usr/bin/env bash
# Real vLLM engines on the CPU behind the router and the store. The engines' environments (3.5 GB each) are kept outside
# the checkout, keyed by their pins; only tests need them.
. "$(dirname "$0")/../lib.sh"
activate_dev
step "the engines' environment"
KVROUTER_VLLM_PYTHON=$(tests/vllm/make_env.sh)
export KVROUTER_VLLM_PYTHON
step "tests/vllm"
python -m pytest -m vllm tests/vllm --timeout 900 -o faulthandler_timeout=600 -v -s -rs
step "the series before: names, identities, tokens, KV events, the tier's contract"
KVROUTER_VLLM_PYTHON=$(VLLM_SERIES=0.31 tests/vllm/make_env.sh)
python -m pytest -m "vllm and every_series" tests/vllm --timeout 900 -o faulthandler_timeout=600 -v -s -rs
