#!/usr/bin/env bash
# Chromium for the status page's tests, from Debian, where it is missing and root asks.
set -euo pipefail
cd "$(dirname "$0")/../.."
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" > /dev/null; then exit 0; fi
done
[ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || exit 0
mkdir -p build/ci
exec 8> build/ci/apt.lock
flock 8 # others install packages too
apt-get update
apt-get install -y --no-install-recommends chromium fonts-dejavu-core
