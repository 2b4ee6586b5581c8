# Sourced by tests/run.sh, .ci/run and examples/quickstart.sh: one way to make the environment.

# make_environment FOLDER [EXTRA]: a virtual environment of $PYTHON (default python3) with this package in it, editable.
make_environment() {
  local folder=$1 extra=${2:-}
  if [ ! -x "$folder/bin/python" ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one: PYTHON=python3.11")'
    "${PYTHON:-python3}" -m venv "$folder"
    # Axolotl takes any torch. An index may offer a small CPU build of an older one; TORCH overrides the choice.
    "$folder/bin/python" -m pip install -q "${TORCH:-torch<2.14}"
  fi
  "$folder/bin/python" -m pip install -q -e ".$extra"
}
