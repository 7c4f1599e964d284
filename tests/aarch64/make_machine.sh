#!/usr/bin/env bash
# An aarch64 Python on this machine: Debian's arm64 Python under Debian's qemu-user-static, both unpacked in a folder and
# not installed. Prints the command that runs it.
#   make_machine.sh SUITE     of Debian: bookworm has CPython 3.11, trixie 3.13. Needs apt-get and mmdebstrap.
set -euo pipefail
suite=$1
cache=${KVROUTER_TEST_CACHE:-$HOME/.cache/kvrouter-tests}
folder=$cache/aarch64-$suite
mkdir -p "$cache"
exec 8> "$cache/aarch64.lock"
flock 8
if [ ! -x "$folder/python" ]; then
  rm -rf "$folder"
  mkdir "$folder"
  mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -E '/debian/?$' | head -1)
  (cd "$folder" && apt-get download -q qemu-user-static && dpkg-deb --extract qemu-user-static*.deb qemu && rm ./*.deb) >&2
  mmdebstrap --quiet --variant=extract --architectures=arm64 --include=python3-minimal,libpython3-stdlib \
    "$suite" "$folder/root" "deb $mirror $suite main" >&2
  cat > "$folder/python.part" <<END
#!/bin/sh
exec $folder/qemu/usr/bin/qemu-aarch64-static -L $folder/root $folder/root/usr/bin/python3 "\$@"
END
  chmod +x "$folder/python.part"
  mv "$folder/python.part" "$folder/python"
fi
echo "$folder/python"
