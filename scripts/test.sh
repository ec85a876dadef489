#!/usr/bin/env bash
# Installs fcsd with its development tools into .venv and runs the tests; arguments go to pytest.
# FCSD_VENV=DIR uses another environment.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
OMP_NUM_THREADS=1 python -m pytest "$@"
