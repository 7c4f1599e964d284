#!/usr/bin/env bash
# The same for the series of vLLM before the newest.
. "$(dirname "$0")/../lib.sh"
python=$(VLLM_SERIES=0.31 tests/vllm/make_env.sh)
python3 -m tests.vllm.install "$python"
