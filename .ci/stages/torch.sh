#!/usr/bin/env bash
# KV caches of torch tensors, and the engine of examples/torch_engine, on the CPU. torch and transformers
# are those of the engines' environment (tests/vllm/make_env.sh), which is kept outside the checkout.
. "$(dirname "$0")/../lib.sh"
activate_dev
step "the engines' environment"
KVROUTER_VLLM_PYTHON=$(tests/vllm/make_env.sh)
export KVROUTER_VLLM_PYTHON
step "tests/torch"
python -m pytest -m torch tests/torch --timeout 300 -o faulthandler_timeout=250 --durations 10 -v -rs
