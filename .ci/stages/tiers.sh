#!/usr/bin/env bash
# Tiers below a store node over Mooncake Store, whose package is kept outside the checkout, keyed by its pins. Those over
# Redis run in the stage tests, InfiniStore in the stage rdma.
. "$(dirname "$0")/../lib.sh"
activate_dev
step "Mooncake Store"
KVROUTER_MOONCAKE=$(benchmarks/connectors/make_peer.sh mooncake python)
LD_LIBRARY_PATH="$KVROUTER_MOONCAKE/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export KVROUTER_MOONCAKE LD_LIBRARY_PATH
step "tests/integration/tiers"
python -m pytest -m mooncake tests/integration/tiers --durations 10 -v -rs
