#!/usr/bin/env bash
# Real vLLM engines on the CPU behind the router and the store. The engines' environment (3.5 GB) is kept outside the
# checkout, keyed by its pins; only tests need it. What starts engines of its own for other ends: kills.sh, smokes.sh, entrypoints.sh.
. "$(dirname "$0")/../lib.sh"
activate_dev
step "the engines' environment"
KVROUTER_VLLM_PYTHON=$(tests/vllm/make_env.sh)
export KVROUTER_VLLM_PYTHON
export KVROUTER_COMPATIBILITY=$PWD/build/compatibility
rm -rf "$KVROUTER_COMPATIBILITY"
step "tests/vllm"
python -m pytest -m vllm tests/vllm --ignore tests/vllm/test_kills.py --ignore tests/vllm/test_guidellm.py \
  --ignore tests/vllm/test_nixl.py --ignore tests/vllm/test_multi_connector.py \
  --ignore tests/vllm/test_entrypoints.py \
  --timeout 900 -o faulthandler_timeout=600 --durations 25 -v -s -rs
step "what ran is what docs/vllm.md says"
python -m tests.vllm.compatibility "$KVROUTER_COMPATIBILITY"
