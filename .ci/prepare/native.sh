#!/usr/bin/env bash
# What the stage native runs, built; with ccache from Debian, which other builds profit from too.
if [ "$(id -u)" = 0 ] && ! command -v ccache > /dev/null; then
  mkdir -p build/ci && exec 8> build/ci/apt.lock && flock 8
  { apt-get update && apt-get install -y --no-install-recommends ccache; } > /dev/null || echo "ccache is not to be had"
  exec 8>&-
fi
. "$(dirname "$0")/../lib.sh"
activate_native
.ci/fuzz --build
.ci/sanitize --build address,undefined build/asan
.ci/sanitize --build thread build/tsan
