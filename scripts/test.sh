#!/usr/bin/env bash
# Runs every check and every test. Makes the environment first. Further arguments go to pytest:
#
#   bash scripts/test.sh [tests/decoding -k eos ...]
#
#   WORKERS=n   processes that run tests (default: one for each core, at most 4; 0 for none beside)
#   JAX_PLATFORMS=cuda   runs them there; the default is four CPU devices
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/setup_environment.sh
source "$root/scripts/setup_environment.sh"

SPECULATIVE_PYTHON="$(cd "$(dirname "$SPECULATIVE_PYTHON")" && pwd)/python"
PATH="$(dirname "$SPECULATIVE_PYTHON"):$PATH"
cd "$root"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
# One part for the code generator: pytest's workers are the parallelism here.
export XLA_FLAGS="--xla_force_host_platform_device_count=4 \
--xla_cpu_parallel_codegen_split_count=1 ${XLA_FLAGS:-}"
# Many tests compile the same programs, in several processes.
JAX_COMPILATION_CACHE_DIR="$(mktemp -d)"
trap 'rm -rf "$JAX_COMPILATION_CACHE_DIR"' EXIT
export JAX_COMPILATION_CACHE_DIR JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.3
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"

failed=()
check() {
  local name="$1"
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}

check "ruff check" ruff check --quiet .
check "ruff format" ruff format --check --quiet .
check "import-linter" lint-imports --no-logo
check "pyrefly" pyrefly check
check "pytest" python -m pytest -n "${WORKERS:-auto}" --maxprocesses 4 --dist loadfile "$@"

if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
