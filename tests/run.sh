#!/usr/bin/env bash
# The whole test suite: environment, style, types, the direction of imports, tests.
#
#   bash tests/run.sh                       bash tests/run.sh -k merge        arguments go to pytest
#   bash tests/run.sh --quick               the checks, and the tests that take neither a training nor long
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
export HF_HUB_OFFLINE=1 AXOLOTL_DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false

quick=
if [ "${1:-}" = --quick ]; then
    quick=yes
    shift
fi
# The quick run takes an environment as it finds it: to bring it up to date, run the whole suite.
if [ -z "$quick" ] || [ ! -x "$venv/bin/python" ]; then
    source tests/environment.sh
    make_environment "$venv" "[test,deepspeed]"
fi
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
if [ -n "$quick" ]; then
    tests -m "not (train or slow or gpu or interpreter)" "$@"
    exit
fi
tests "$@"

# The Triton kernels on the CPU, unless files were named: Triton decides at its first import whether it interprets.
for argument in "$@"; do
    if [ -e "${argument%%::*}" ]; then exit; fi
done
TRITON_INTERPRET=1 SUPERTUNE_KERNELS=triton tests tests/interpreter "$@" || [ $? = 5 ]
