#!/usr/bin/env bash
# vLLM's own tests of its HTTP endpoints: what passes at an engine alone passes through the router before two others.
# The tests, of vLLM's source distribution, and the environments are kept outside the checkout, keyed by their pins.
. "$(dirname "$0")/../lib.sh"
activate_dev
step "the engines' environment, vLLM's tests"
KVROUTER_VLLM_PYTHON=$(tests/vllm/make_env.sh)
export KVROUTER_VLLM_PYTHON
tests/vllm/make_entrypoints.sh "$KVROUTER_VLLM_PYTHON"
step "tests/vllm/test_entrypoints.py"
python -m pytest -m vllm tests/vllm/test_entrypoints.py -o faulthandler_timeout=1700 -v -s -rs
