#!/usr/bin/env bash
# What the stage native runs, built. First what installs Debian packages: no other stage does that so early.
. "$(dirname "$0")/../lib.sh"
activate_native
.ci/fuzz --build
.ci/sanitize --build address,undefined build/asan
.ci/sanitize --build thread build/tsan
