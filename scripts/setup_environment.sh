#!/usr/bin/env bash
# Makes the environment: a venv with the locked packages and this checkout, editable.
#
#   bash scripts/setup_environment.sh            # or sourced: leaves $SPECULATIVE_PYTHON set
#
#   VENV=path      the environment (default: .venv in the checkout)
#   PYTHON=python  the interpreter to make it with (default: the first of python3.11, python3.12,
#                  python3.13 and python3 that is 3.11 to 3.13)
#   EXTRAS=cuda    also installs that extra of setup.py (cuda, cuda12, tpu), held to the lock
#
# A second run finds its stamp, does nothing and needs no network. A run that was interrupted begins
# again. An environment that this script did not make is filled up, never emptied.

speculative_find_python() {
  # Prints an interpreter of the right version that can make environments.
  local candidate without_venv=""
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if ! "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
      >/dev/null 2>&1; then
      continue
    fi
    if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      echo "$candidate"
      return 0
    fi
    without_venv="${without_venv:-$candidate}"
  done
  if [[ -n "$without_venv" ]]; then
    echo "set-up: $without_venv cannot make environments: its venv module is missing." \
      "On Debian and Ubuntu: apt-get install python3-venv" >&2
  elif [[ -n "${PYTHON:-}" ]]; then
    echo "set-up: PYTHON=$PYTHON is not a Python from 3.11 to 3.13." >&2
  else
    echo "set-up: no Python from 3.11 to 3.13 found; install one, or name it with PYTHON=..." >&2
  fi
  return 1
}

speculative_satisfied() {
  # Whether everything in the lock, and this checkout, is in the environment already.
  "$1" - "$2" <<'PYTHON_CODE' 2>/dev/null
import importlib.metadata
import pathlib
import sys

from pip._vendor.packaging.requirements import Requirement

sys.path = [p for p in sys.path if p]  # Not the current folder: what is installed counts.
root = pathlib.Path(sys.argv[1])
for line in (root / "requirements.lock").read_text().splitlines():
    if "==" not in line or line.lstrip().startswith("#"):
        continue
    wanted = Requirement(line)
    if wanted.marker is None or wanted.marker.evaluate():
        if not wanted.specifier.contains(importlib.metadata.version(wanted.name), prereleases=True):
            sys.exit(1)
importlib.metadata.version("speculative")
import speculative

sys.exit(pathlib.Path(speculative.__file__).resolve().parent.parent != root.resolve())
PYTHON_CODE
}

speculative_set_up() {
  local root venv stamp_file started_file stamp python found
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  venv="${VENV:-$root/.venv}"
  stamp_file="$venv/.speculative-installed"
  started_file="$venv/.speculative-started"
  python="$venv/bin/python"
  # shellcheck disable=SC2034  # For the scripts that source this one.
  SPECULATIVE_PYTHON="$python"
  # What the environment depends on: the lock, the ranges, the place of the checkout, the extra.
  stamp="$({ cat "$root/requirements.lock" "$root/setup.py"; echo "$root ${EXTRAS:-}"; } |
    cksum | tr ' ' '-')"

  if [[ -f "$stamp_file" && "$(cat "$stamp_file")" == "$stamp" ]] &&
    "$python" -c '' >/dev/null 2>&1; then
    return 0
  fi

  if [[ ! -x "$python" || -f "$started_file" ]] || ! "$python" -m pip --version >/dev/null 2>&1; then
    if [[ -d "$venv" && ! -f "$started_file" && -n "$(ls -A "$venv")" &&
      ! -f "$venv/pyvenv.cfg" ]]; then
      echo "set-up: $venv is there and is not an environment; name another with VENV=..." >&2
      return 1
    fi
    found="$(speculative_find_python)" || return 1
    echo "set-up: making $venv with $("$found" --version)"
    mkdir -p "$venv" || return 1
    "$found" -m venv --clear "$venv" || return 1
  fi

  if [[ -z "${EXTRAS:-}" ]] && speculative_satisfied "$python" "$root"; then
    echo "$stamp" >"$stamp_file"
    return 0
  fi

  # From here to the stamp the environment is half made; a later run sees this and starts afresh
  # (unless somebody else made it: then it is only filled up again).
  rm -f "$stamp_file"
  if [[ -n "${found:-}" ]]; then
    touch "$started_file"
  fi
  echo "set-up: installing the packages of requirements.lock (some minutes, about 3 GB)"
  if ! "$python" -m pip install -qq --disable-pip-version-check --no-deps \
    -r "$root/requirements.lock"; then
    echo "set-up: pip could not install the packages (its message is above); is there a network?" \
      "Run the same command again to go on." >&2
    return 1
  fi
  "$python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation \
    --editable "$root" || return 1
  if [[ -n "${EXTRAS:-}" ]]; then
    "$python" -m pip install -qq --disable-pip-version-check --no-build-isolation \
      --constraint "$root/requirements.lock" --editable "${root}[$EXTRAS]" || return 1
  fi
  echo "$stamp" >"$stamp_file"
  rm -f "$started_file"
  echo "set-up: done"
}

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
  set -euo pipefail
fi
speculative_set_up
