#!/usr/bin/env bash
# kvcore's own tests under sanitizers, then a short fuzz of everything that reads bytes of a stranger.
. "$(dirname "$0")/../lib.sh"
activate_native
step "AddressSanitizer, UBSan"
make csrc-test
step "ThreadSanitizer"
make csrc-tsan
step "fuzz"
make fuzz
