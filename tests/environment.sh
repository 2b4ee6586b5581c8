# Sourced by tests/run.sh, .ci/run and examples/quickstart.sh: one way to make the environment.

# make_environment FOLDER [EXTRA]: a virtual environment of $PYTHON (default python3) with this package in it, editable.
make_environment() {
  local folder=$1 extra=${2:-} python=${PYTHON:-python3} torch=()
  if [ ! -x "$folder/bin/python" ]; then
    if ! command -v "$python" > /dev/null; then
      echo "there is no $python: Python 3.11 or newer is needed; name one, as PYTHON=python3.11" >&2
      return 1
    fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one, as PYTHON=python3.11")'
    "$python" -m venv "$folder"
  fi
  # Whatever an earlier run did not come to is made up for.
  "$folder/bin/python" -m pip --version > /dev/null 2>&1 || "$folder/bin/python" -m ensurepip > /dev/null
  if [ ! -x "$folder/bin/uv" ]; then
    "$folder/bin/python" -m pip install -q uv || echo "uv could not be installed, so pip installs the packages; this takes longer"
  fi
  if ! "$folder/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    # Axolotl takes any torch. An index may offer a small CPU build of an older one; TORCH overrides the choice.
    torch=("${TORCH:-torch<2.14}")
  fi
  install_packages "$folder" "${torch[@]}" -e ".$extra"
}

# install_packages FOLDER ARGUMENT...: `pip install` into it, by uv where it is there, which is several times faster.
install_packages() {
  local folder=$1 settings=() value
  shift
  if [ -x "$folder/bin/uv" ]; then
    # uv does not read pip's settings: hand on the index and the folders of wheels.
    value=$(pip_setting "$folder" index-url)
    if [ -n "$value" ]; then settings+=(--default-index "$value"); fi
    value=$(pip_setting "$folder" find-links)
    if [ -n "$value" ]; then settings+=(--find-links "$value"); fi
    # Shown are the lines that say how far it is, not those that name each package.
    if "$folder/bin/uv" pip install --python "$folder/bin/python" "${settings[@]}" "$@" 2>&1 |
      grep --line-buffered -v '^ [-+~] '; then
      return
    fi
    echo "uv failed (see above), so pip installs the packages; this takes longer"
  fi
  "$folder/bin/python" -m pip install -q "$@"
}

# pip_setting FOLDER NAME: the value of one of pip's settings, empty if there is none.
pip_setting() {
  { "$1/bin/python" -m pip config list 2> /dev/null || true; } | sed -n "s/^.*\.$2='\(.*\)'\$/\1/p" | head -n 1
}
