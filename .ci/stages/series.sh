#!/usr/bin/env bash
# The series of vLLM before the newest: names of blocks, identities, tokens, KV events, the tier's contract.
. "$(dirname "$0")/../lib.sh"
activate_dev
step "its environment"
KVROUTER_VLLM_PYTHON=$(VLLM_SERIES=0.31 tests/vllm/make_env.sh)
export KVROUTER_VLLM_PYTHON
step "tests/vllm, every_series"
python -m pytest -m "vllm and every_series" tests/vllm --timeout 900 -o faulthandler_timeout=600 -v -s -rs
