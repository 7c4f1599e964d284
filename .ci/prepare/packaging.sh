#!/usr/bin/env bash
# The source distributions and wheels that the stage packaging tries.
. "$(dirname "$0")/../lib.sh"
with_docker python3 -m tests.packaging.build build/ci/wheels
