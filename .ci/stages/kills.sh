#!/usr/bin/env bash
# Real vLLM engines that are killed under streams; apart from the engines' stage, for it starts four of its own.
. "$(dirname "$0")/../lib.sh"
activate_dev
KVROUTER_VLLM_PYTHON=$(tests/vllm/make_env.sh)
export KVROUTER_VLLM_PYTHON
step "tests/vllm/test_kills.py"
python -m pytest -m vllm tests/vllm/test_kills.py --timeout 400 -o faulthandler_timeout=0 -v -s -rs
