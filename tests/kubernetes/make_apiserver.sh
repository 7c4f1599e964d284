#!/bin/sh
# Make (once) a real Kubernetes API server and its etcd from Debian's packages, and print the folder of both programs.
#   make_apiserver.sh        into $KVROUTER_TEST_CACHE, else ~/.cache/kvrouter-tests
# Debian has no package of the server, but Debian 12's source of kubectl is that of all of Kubernetes, with every library
# that it needs. Compiled with Debian 12's Go: a quarter of an hour on two processors, 200 MB. Needs Debian 12, not root,
# and nothing is installed.
set -eu

SOURCE="kubernetes=1.20.5+really1.20.2-1.1+deb12u1"
PACKAGES="golang-1.19-go golang-1.19-src etcd-server"

folder="${KVROUTER_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter-tests}"
key=$(printf '%s' "$SOURCE $PACKAGES $(uname -m)" | sha256sum | cut -c1-16)
made="$folder/apiserver-$key"

# apt with an index of sources of its own: a machine's index seldom has them.
apt_sources() {
    # shellcheck disable=SC2086
    apt-get -q -o Dir::State::lists="$work/lists" -o Dir::Etc::sourcelist="$work/sources.list" \
        -o Dir::Etc::sourceparts=/dev/null -o APT::Sandbox::User="$(id -un)" "$@" >&2
}

fetch() {
    mkdir -p "$work/lists/partial" "$work/root"
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Codename: bookworm' | sort -u | head -1)
    [ -n "$mirror" ] || { echo "apt knows no mirror of Debian 12" >&2; exit 1; }
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" > "$work/sources.list"
    (
        cd "$work"
        apt_sources update
        apt_sources source --download-only "$SOURCE"
        # shellcheck disable=SC2086
        apt-get -q -o APT::Sandbox::User="$(id -un)" download $PACKAGES >&2
        for package in *.deb; do dpkg -x "$package" root; done
        mkdir -p gopath/src/k8s.io/kubernetes
        tar -xzf kubernetes_*.orig.tar.gz --strip-components 1 -C gopath/src/k8s.io/kubernetes
    )
}

# The server refuses to start without its OpenAPI definitions, which Kubernetes' own build generates.
generate() {
    kubernetes=k8s.io/kubernetes
    go build -o "$work/openapi-gen" "$kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen"
    packages=$(grep -rl --include='*.go' -e '+k8s:openapi-gen=' pkg staging/src | xargs -n 1 dirname | sort -u |
        sed "s#^staging/src/#vendor/#; s#^#$kubernetes/#" | paste -sd,)
    "$work/openapi-gen" -h hack/boilerplate/boilerplate.generatego.txt -O zz_generated.openapi \
        --output-package "$kubernetes/pkg/generated/openapi" -i "$packages" -r "$work/violations" \
        --output-base "$work/gopath/src" >&2
}

build() (
    export GOROOT="$work/root/usr/lib/go-1.19" GOPATH="$work/gopath" GOCACHE="$work/cache"
    export GO111MODULE=off CGO_ENABLED=0 PATH="$work/root/usr/lib/go-1.19/bin:$PATH"
    cd "$GOPATH/src/k8s.io/kubernetes"
    generate
    go build -ldflags '-s -w' -o "$work/kube-apiserver" k8s.io/kubernetes/cmd/kube-apiserver
)

mkdir -p "$folder"
exec 9> "$folder/apiserver.lock"
flock 9
if [ ! -d "$made" ]; then
    work=$(mktemp -d "$folder/apiserver-work.XXXXXX")
    trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
    fetch
    build
    mkdir "$work/made"
    mv "$work/kube-apiserver" "$work/root/usr/bin/etcd" "$work/made/"
    mv "$work/made" "$made"
fi
echo "$made"
