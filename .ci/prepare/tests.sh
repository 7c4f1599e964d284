#!/usr/bin/env bash
# redis-server, nginx and prometheus from Debian, where they are missing and root asks: several routers share what they know
# over a real Redis, are restarted behind a real NGINX, and scraped by a real Prometheus. RUNLEVEL: the servers that come
# with them are not started.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PATH:/usr/sbin
wanted=()
for program in redis-server nginx prometheus; do # Debian names the packages so, too
  command -v "$program" > /dev/null || wanted+=("$program")
done
[ "${#wanted[@]}" -gt 0 ] || exit 0
[ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || exit 0
mkdir -p build/ci
exec 8> build/ci/apt.lock
flock 8 # others install packages too
apt-get update
RUNLEVEL=1 apt-get install -y --no-install-recommends "${wanted[@]}"
