#!/usr/bin/env bash
# Two minutes of a router at 70 % load, 2,000 idle streams before: its memory, latency and CPU per request must not grow.
. "$(dirname "$0")/../lib.sh"
activate_dev
make soak
