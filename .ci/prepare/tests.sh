#!/usr/bin/env bash
# redis-server from Debian, where it is missing and root asks: several routers share what they know over a real one.
# RUNLEVEL: the server that comes with it is not started.
set -euo pipefail
cd "$(dirname "$0")/../.."
! command -v redis-server > /dev/null || exit 0
[ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || exit 0
mkdir -p build/ci
exec 8> build/ci/apt.lock
flock 8 # others install packages too
apt-get update
RUNLEVEL=1 apt-get install -y --no-install-recommends redis-server
