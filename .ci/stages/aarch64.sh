#!/usr/bin/env bash
# The aarch64 wheels, built with zig, in Debian's arm64 Python under QEMU. As root it installs the Debian package mmdebstrap
# where it is missing; QEMU and that Python are unpacked outside the checkout and not installed.
. "$(dirname "$0")/../lib.sh"
activate_dev
if ! command -v mmdebstrap > /dev/null; then
  [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || skip "no mmdebstrap here, and no root of Debian to install it"
  flock build/ci/apt.lock sh -c 'apt-get update && apt-get install -y --no-install-recommends mmdebstrap'
fi
export KVROUTER_AARCH64_WHEELS=$ROOT/build/ci/aarch64
python -m pytest -m aarch64 tests/aarch64 --timeout 1500 -o faulthandler_timeout=0 -v -rs
