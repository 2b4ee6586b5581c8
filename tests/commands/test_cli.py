"""The command line as a whole: what it loads, and where a command is."""

import subprocess
import sys
from importlib import import_module

import pytest

from axolotl_supertune.commands.cli import supertune


def test_help_waits_for_no_torch():
    heavy = "{'torch', 'axolotl', 'transformers', 'peft', 'datasets', 'lm_eval'}"
    code = f"import sys, axolotl_supertune.commands.cli; sys.exit(repr({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize("name", supertune.commands)
def test_a_command_is_in_the_file_of_its_name(name):
    file = {"eval": "evaluate"}.get(name, name)
    assert getattr(import_module(f"axolotl_supertune.commands.{file}"), file) is supertune.commands[name]
