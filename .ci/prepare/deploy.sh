#!/usr/bin/env bash
# What deploy/ is checked with, in $CACHE/deploy. Debian's packages are unpacked and not installed: no service starts.
. "$(dirname "$0")/../lib.sh"
PATH=$PATH:/usr/sbin
mkdir -p "$CACHE/docker" "$CACHE/deploy/usr/bin"
exec 8> "$CACHE/deploy.lock"
flock 8
compose() { # where Compose lies among the unpacked packages of the private Docker engine
  PYTHONPATH=.ci python3 -c 'import sys, pathlib, docker_engine as engine
print(engine.unpacked_engine(pathlib.Path(sys.argv[1])) / "usr/libexec/docker/cli-plugins/docker-compose")' "$CACHE/docker"
}
unpack() { # PROGRAM PACKAGE...: where the program is missing
  command -v "$1" > /dev/null || compgen -G "$CACHE/deploy/usr/*bin/$1" > /dev/null && return
  local folder each
  folder=$(mktemp -d)
  (cd "$folder" && apt-get download "${@:2}" && for each in *.deb; do dpkg-deb --extract "$each" "$CACHE/deploy"; done)
  rm -r "$folder"
}
lacking() { # PACKAGE: it and the libraries that are not installed
  apt-get --simulate --no-install-recommends install "$1" | sed -n 's/^Inst \([^ ]*\).*/\1/p'
}
[ "$(id -u)" != 0 ] || (flock 9 && apt-get update) 9> build/ci/apt.lock # others install packages at the same time
unpack promtool prometheus
unpack nginx nginx
mapfile -t packages < <(lacking haproxy)
unpack haproxy "${packages[@]}"
command -v docker-compose > /dev/null || ln -sf "$(compose)" "$CACHE/deploy/usr/bin/"
