#!/usr/bin/env bash
# What runs beside the project's own data path, once each: NixlConnector in real vLLM, guidellm as a judge.
. "$(dirname "$0")/../lib.sh"
activate_dev
KVROUTER_VLLM_PYTHON=$(tests/vllm/make_env.sh)
KVROUTER_NIXL_SITE=$(tests/vllm/make_nixl.sh) || echo "NIXL cannot be installed: its tests are skipped"
export KVROUTER_VLLM_PYTHON KVROUTER_NIXL_SITE
step "tests/vllm: NIXL, guidellm"
python -m pytest -m vllm tests/vllm/test_nixl.py tests/vllm/test_multi_connector.py tests/vllm/test_guidellm.py \
  --timeout 500 -o faulthandler_timeout=0 -v -s -rs
