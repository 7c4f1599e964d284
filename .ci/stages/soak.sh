#!/usr/bin/env bash
# Two minutes of a router at 70 % load, 2,000 idle streams before: memory must not grow, and nothing be left over.
. "$(dirname "$0")/../lib.sh"
activate_dev
make soak
