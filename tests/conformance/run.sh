#!/usr/bin/env bash
# PEFT's own tests with SUPRA in their lists; nothing of them is kept in this repository.
#
#   bash tests/conformance/run.sh [PYTHON] [arguments of pytest]     PYTHON: of an environment with this package
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-${VENV:-.venv}/bin/python}
export AXOLOTL_DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
exec "$python" tests/conformance/run.py "${@:2}"
