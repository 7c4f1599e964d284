#!/usr/bin/env bash
# The distributions: built with zig in a container of each Python (.ci/prepare/packaging.sh), then tried in fresh
# environments and in containers without a compiler. Starts a private Docker engine where none answers: see containers.sh.
. "$(dirname "$0")/../lib.sh"
activate_dev
export KVROUTER_WHEELS=$ROOT/build/ci/wheels
with_docker python -m pytest -m packaging tests/packaging --timeout 500 -o faulthandler_timeout=0 -v -rs
can_run_containers || skip "not tried in containers: no Docker engine answers, and a private one needs root"
