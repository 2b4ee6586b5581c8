#!/usr/bin/env bash
# The whole test suite: environment, style, types, the direction of imports, tests.
#
#   bash tests/run.sh                       bash tests/run.sh -k merge        arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
export HF_HUB_OFFLINE=1 AXOLOTL_DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false

source tests/environment.sh
make_environment "$venv" "[test,deepspeed]"
export PATH="$PWD/$venv/bin:$PATH"
case $venv in /*) export PATH="$venv/bin:$PATH" ;; esac

ruff check .
ruff format --check .
mypy
lint-imports
# Tests are shared out among processes of one thread each.
tests() {
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} python -m pytest --show-capture=stderr -n logical --maxprocesses 4 \
        --dist worksteal "$@"
}
tests "$@"

# The Triton kernels on the CPU, unless files were named: Triton decides at its first import whether it interprets.
for argument in "$@"; do
    if [ -e "${argument%%::*}" ]; then exit; fi
done
TRITON_INTERPRET=1 SUPERTUNE_KERNELS=triton tests tests/interpreter "$@" || [ $? = 5 ]
