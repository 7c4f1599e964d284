#!/usr/bin/env bash
# The backend of SGLang's HiCache under SGLang's own factory and host pools, on the CPU, over a store node. The environment
# is kept outside the checkout, keyed by its pins; only tests need it. Whole engines: sglang-engines.sh.
. "$(dirname "$0")/../lib.sh"
activate_dev
step "SGLang's environment"
KVROUTER_SGLANG_PYTHON=$(tests/sglang/make_env.sh "$(tests/vllm/make_env.sh)")
export KVROUTER_SGLANG_PYTHON
step "tests/sglang"
python -m pytest -m sglang tests/sglang/test_hicache.py --timeout 300 -o faulthandler_timeout=250 --durations 10 -v -rs
