#!/usr/bin/env bash
# Real vLLM engines on the CPU behind the router and the store. The engines' environment (3.5 GB) is kept outside the
# checkout, keyed by its pins; only tests need it.
. "$(dirname "$0")/../lib.sh"
activate_dev
step "the engines' environment"
KVROUTER_VLLM_PYTHON=$(tests/vllm/make_env.sh)
KVROUTER_NIXL_SITE=$(tests/vllm/make_nixl.sh) || echo "NIXL cannot be installed: its tests are skipped"
export KVROUTER_VLLM_PYTHON KVROUTER_NIXL_SITE
step "tests/vllm"
python -m pytest -m vllm tests/vllm --ignore tests/vllm/test_kills.py --timeout 900 -o faulthandler_timeout=600 -v -s -rs
