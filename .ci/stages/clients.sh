#!/usr/bin/env bash
# Clients of other projects, in pinned versions, before a router over simulated engines and before one engine alone. Their
# environments are kept outside the checkout, keyed by their locks.
. "$(dirname "$0")/../lib.sh"
activate_dev
step "environments of the clients"
.ci/prepare/clients.sh
step "tests/clients"
python -m pytest -m clients tests/clients --timeout 300 -o faulthandler_timeout=250 --durations 10 -v -rs
