#!/usr/bin/env bash
# Decodes real text with the shipped pair of models, speculative beside autoregressive, at
# temperature 0 and 1. Makes the environment first. Further arguments go to the run:
#
#   bash scripts/quickstart.sh [--gin.NAME=VALUE ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/setup_environment.sh
source "$root/scripts/setup_environment.sh"

# The environment's place may have been given relative to where the caller stands.
SPECULATIVE_PYTHON="$(cd "$(dirname "$SPECULATIVE_PYTHON")" && pwd)/python"
cd "$root"
"$SPECULATIVE_PYTHON" -m speculative.main \
  --run_mode=evaluate \
  --gin_file=configs/runs/quickstart.gin \
  --gin.OUTPUT_DIR="'runs/quickstart'" \
  "$@"

for name in record.json report.html; do
  if [[ -f "runs/quickstart/$name" ]]; then
    echo "$name: $root/runs/quickstart/$name"
  fi
done
