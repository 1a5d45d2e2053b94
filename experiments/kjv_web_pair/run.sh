#!/usr/bin/env bash
# Evaluates the shipped pair on the whole test split, 32 verses at a time.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=scripts/setup_environment.sh
source "$root/scripts/setup_environment.sh"
cd "$root"
"$SPECULATIVE_PYTHON" -m speculative.main \
  --run_mode=evaluate \
  --gin_file=configs/runs/quickstart.gin \
  --gin_file=experiments/kjv_web_pair/full_test.gin \
  --gin.OUTPUT_DIR="'runs/kjv_web_full_test'" \
  "$@"
