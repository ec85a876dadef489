#!/usr/bin/env bash
# Runs the tests on any machine with Python 3.11: installs system packages that are missing (as root on Debian or Ubuntu;
# otherwise says which), and fcsd with its development tools into .venv. Arguments go to pytest.
# One pytest process runs on each core, but not more than 8, because many tests start further processes. (nproc prints
# OMP_NUM_THREADS where that is set, so it is taken away.)
# tests/conftest.py orders the files, each of which runs in one of these processes.
# FCSD_VENV=DIR uses another environment than .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
OMP_NUM_THREADS=1 python -m pytest -n "$(env -u OMP_NUM_THREADS nproc)" --maxprocesses 8 --dist loadscope --no-loadscope-reorder "$@"
