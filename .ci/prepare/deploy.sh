#!/usr/bin/env bash
# What deploy/ is checked with. Debian's packages are unpacked and not installed: no service of theirs starts.
. "$(dirname "$0")/../lib.sh"
export KVROUTER_CI_CACHE=$CACHE
python3 .ci/docker_engine.py --compose
unpack() { # PROGRAM PACKAGE: where the program is missing
  command -v "$1" > /dev/null || compgen -G "$CACHE/deploy/usr/*bin/$1" > /dev/null && return
  local folder
  folder=$(mktemp -d)
  (cd "$folder" && apt-get download "$2" && mkdir -p "$CACHE/deploy" && dpkg-deb --extract ./*.deb "$CACHE/deploy")
  rm -r "$folder"
}
exec 8> "$CACHE/deploy.lock"
flock 8
[ "$(id -u)" != 0 ] || apt-get update
PATH=$PATH:/usr/sbin
unpack promtool prometheus
unpack nginx nginx
