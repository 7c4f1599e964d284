#!/usr/bin/env bash
# What the stage native runs, built. First what installs Debian packages: no other stage does that so early.
# RUNLEVEL: a server that is there for tests is not started.
for program in ccache redis-server; do
  if [ "$(id -u)" = 0 ] && ! command -v "$program" > /dev/null; then
    mkdir -p build/ci && exec 8> build/ci/apt.lock && flock 8
    { apt-get update && RUNLEVEL=1 apt-get install -y --no-install-recommends "$program"; } > /dev/null || echo "$program is not to be had"
    exec 8>&-
  fi
done
. "$(dirname "$0")/../lib.sh"
activate_native
.ci/fuzz --build
.ci/sanitize --build address,undefined build/asan
.ci/sanitize --build thread build/tsan
