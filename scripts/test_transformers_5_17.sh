#!/usr/bin/env bash
# Runs the model tests on transformers 5.17, the oldest supported version, laid over the usual environment.
# Arguments replace the list of test files. FCSD_VENV=DIR uses another environment than .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
overlay=$(realpath -m "$venv/transformers-5.17") # processes that a test starts elsewhere find it, too
if [ ! -e "$overlay/complete" ]; then
  rm -rf "$overlay"
  python -m pip install --disable-pip-version-check --quiet --target "$overlay" 'transformers==5.17.*'
  touch "$overlay/complete"
fi
export OMP_NUM_THREADS=1 PYTHONPATH="$overlay"
python -c 'import transformers; print("transformers", transformers.__version__); assert transformers.__version__.startswith("5.17.")'
[ $# -gt 0 ] || set -- tests/models/test_{wiring,build,desync,export_template}.py
python -m pytest "$@"
