#!/bin/sh
# Make (once) a folder with a peer's connector for engines' PYTHONPATH and print it.
#   make_peer.sh lmcache|mooncake|infinistore PYTHON [FOLDER]     PYTHON: of the vLLM environment
#                                                     FOLDER: $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests
# Keyed by its pins; 100 to 150 MB. Without its dependencies, which would bring other versions of what vLLM has; the pins
# name the few that vLLM does not have. Mooncake also needs libibverbs, which no wheel has: if the machine has none, the
# distribution's packages are unpacked into FOLDER/.../lib, for LD_LIBRARY_PATH. They are not installed.
set -eu

peer="$1"
PYTHON="$2"
case "$peer" in
lmcache) PINS="lmcache==0.5.6 sortedcontainers==2.4.0" ;;
mooncake) PINS="mooncake-transfer-engine-non-cuda==0.3.13.post1 msgpack==1.2.4" ;;
infinistore) PINS="infinistore==0.2.35 uvloop==0.21.0 fastapi==0.115.12 starlette==0.46.2 uvicorn==0.34.2" ;; # what its server imports
*) echo "no such peer: $peer" >&2; exit 2 ;;
esac
VERBS="libibverbs1 libnl-3-200 libnl-route-3-200"

. "$(dirname "$0")/../../tests/make_once.sh"

make() {
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install --quiet --no-deps --target "$made" $PINS >&2
    if [ "$peer" = mooncake ] && ! ldconfig -p | grep -q 'libibverbs\.so\.1'; then
        mkdir -p "$made/debian" "$made/lib"
        # shellcheck disable=SC2086
        (cd "$made/debian" && apt-get download --quiet $VERBS >&2 && for file in *.deb; do dpkg-deb -x "$file" .; done)
        find "$made/debian" -name 'lib*.so.*' -exec cp -P {} "$made/lib/" \;
    fi
}

make_once "$peer" "$PINS $("$PYTHON" -V)" "${3:-}"
echo "$made"
