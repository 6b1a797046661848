#!/usr/bin/env bash
# Makes .venv from the hashed requirements: uv from PyPI into .uv (never into the system's Python), a Python 3.12, the packages, this package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. envs/cache.sh
say() { printf 'setup: %s\n' "$*" >&2; }

find_python() { # a Python 3.12 that is on PATH, or held by pyenv without being active, or whatever uv finds or fetches
  local p
  for p in "$(command -v python3.12 || true)" "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.12.*/bin/python3.12; do
    [ -n "$p" ] && [ -x "$p" ] && "$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && { echo "$p"; return; }
  done
  echo 3.12
}

if [ ! -x .uv/bin/uv ]; then
  say "uv is not here yet: installing it from PyPI into .uv"
  host=$(command -v python3) || { say "no python3 on PATH to start from"; exit 1; }
  "$host" -m venv .uv || { say "python3 cannot make a virtual environment (on Debian: apt-get install python3-venv)"; exit 1; }
  .uv/bin/python -m pip install -q --disable-pip-version-check 'uv>=0.9'
fi
uv=.uv/bin/uv

python=$(find_python)
[ -x .venv/bin/python ] && .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || {
  say "making .venv with Python $python"
  "$uv" venv -q --clear --python "$python" .venv
}
say "installing the pinned packages (about a minute, 6 GB on disk)"
export VIRTUAL_ENV=$PWD/.venv
# --compile-bytecode: the frameworks' imports are most of the time of a small run.
"$uv" pip sync -q --require-hashes --compile-bytecode envs/requirements.txt
"$uv" pip install -q --no-deps --no-build-isolation -e .
touch .venv/.complete
say "ready: .venv/bin/train-ledger"
