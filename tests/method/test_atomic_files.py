"""What the disk or its rights refuse, told with the file, the reason and the remedy."""

import errno
import os
import subprocess
import sys

import pytest

from axolotl_supertune.method.atomic_files import whole_file, writing

# As on a full disk, but of this process alone.
FULL = """
import resource, sys, torch
from safetensors.torch import save_file
from axolotl_supertune.method.atomic_files import whole_file, writing
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
with writing(sys.argv[1]), whole_file(sys.argv[1]) as temporary:
    save_file({"a": torch.zeros(100_000)}, temporary)
"""


@pytest.mark.slow
def test_a_file_of_safetensors_that_does_not_fit_is_named(tmp_path):
    target = tmp_path / "norms.safetensors"
    ran = subprocess.run([sys.executable, "-c", FULL, str(target)], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == f"ValueError: {target}: File too large. Make room, or name another place."
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Make room"),
        (errno.EDQUOT, "Make room"),
        (errno.EROFS, "Make room"),
        (errno.EACCES, "Give this user the rights"),
    ],
)
@pytest.mark.parametrize("named", [None, ".saving.abc/files/table.csv"])
def test_what_the_disk_refuses_names_the_file_and_no_temporary_one(tmp_path, number, remedy, named):
    target = tmp_path / "table.csv"
    with pytest.raises(ValueError, match=remedy) as caught, writing(target), whole_file(target):
        raise OSError(number, os.strerror(number), *([named] if named else []))
    assert str(caught.value) == f"{target}: {os.strerror(number)}. {remedy}, or name another place."
    assert not list(tmp_path.iterdir())


def test_other_errors_pass(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"), writing(tmp_path / "table.csv"):
        (tmp_path / "nowhere").read_text()
