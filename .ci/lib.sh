# Sourced by every stage: the repository root as working directory, one virtual environment for all stages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
VENV=$ROOT/build/ci/venv
CACHE=${KVROUTER_CI_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter-ci}

# What did not change since another run is not compiled again, wherever the checkout lies; without ccache it only takes longer.
if command -v ccache > /dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_DIR=$CACHE/ccache CCACHE_BASEDIR=$ROOT CCACHE_NOHASHDIR=1
  mkdir -p "$CCACHE_DIR"
fi

# The README's own commands, the N-th of the block after <!-- two commands -->.
readme_command() {
  awk '/<!-- two commands -->/ { seen = 1 } seen && /^\$ / { print substr($0, 3) } seen && /^```$/ { exit }' README.md |
    sed -n "${1}p"
}

# Leaves the stage as skipped, with the reason that the summary shows.
skip() {
  echo "skip: $*"
  exit 75
}

# Activates the environment that the README's commands install into; made fresh by the first stage.
activate() {
  [ -e "$VENV/bin/activate" ] || python3 -m venv "$VENV"
  # shellcheck disable=SC1091
  . "$VENV/bin/activate"
}

# Activates it with the development dependencies; installs them where a stage is run alone. One stage at a time.
activate_dev() {
  mkdir -p "$ROOT/build/ci"
  exec 9> "$ROOT/build/ci/venv.lock"
  flock 9
  activate
  python -c 'import pytest, kvrouter' 2> /dev/null || python -m pip install --quiet '.[dev]'
  exec 9>&-
}

# Brings cmake and ninja alone: what is built without Python need not wait for the development dependencies.
activate_native() {
  local tools=$ROOT/build/ci/tools
  [ -x "$tools/bin/ninja" ] || { python3 -m venv "$tools" && "$tools/bin/pip" install --quiet cmake ninja; }
  PATH=$tools/bin:$PATH
}

# Whether containers can run here: a Docker engine answers, or root can start a private one.
can_run_containers() { [ "$(id -u)" = 0 ] || docker info > /dev/null 2>&1; }

# Runs a command with a Docker engine, a private one where none answers. Without any, where containers cannot run.
with_docker() {
  if can_run_containers; then
    KVROUTER_CI_CACHE=$CACHE python3 .ci/docker_engine.py "$@"
  else
    "$@"
  fi
}

step() { printf -- '--- %s\n' "$*"; }
