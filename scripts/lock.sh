#!/usr/bin/env bash
# Compiles requirements.lock from the ranges in setup.py: one file for Python 3.11 to 3.13 and every
# platform. Keeps what the lock has where the ranges allow it; UPGRADE=1 takes the newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${VENV:-.venv}/bin/python"
if ! "$python" -m uv --version >/dev/null 2>&1; then
  echo "lock.sh: no uv in ${VENV:-.venv}; run 'bash scripts/setup_environment.sh' first." >&2
  exit 1
fi

options=()
if [[ -n "${UPGRADE:-}" ]]; then
  options+=(--upgrade)
fi
"$python" -m uv pip compile setup.py --extra dev --universal --python-version 3.11 \
  --no-emit-index-url --no-emit-find-links --custom-compile-command "bash scripts/lock.sh" \
  --output-file requirements.lock --quiet "${options[@]+"${options[@]}"}"
echo "requirements.lock: $(grep -c '==' requirements.lock) pins"
