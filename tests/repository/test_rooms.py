"""The package's folders: how many there are, what their README.md says, and what is named in one of them only."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "axolotl_supertune"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ROOMS = sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").exists())


def modules(folder):
    """The Python files of a room that are read for what they do."""
    return [path for path in sorted(folder.rglob("*.py")) if path.name != "__init__.py"]


def code_of(path):
    """The text of a file without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def named_in(pattern, *, outside):
    """The files of the package, outside a folder, whose code matches a regular expression."""
    files = [path for path in PACKAGE.rglob("*.py") if PACKAGE / outside not in path.parents]
    return {str(path.relative_to(PACKAGE)) for path in files if re.search(pattern, code_of(path), re.IGNORECASE)}


def test_the_package_has_few_entries():
    entries = {path.name for path in PACKAGE.iterdir()} - {"py.typed", "README.md", "__pycache__"}
    assert len(entries) <= 10, f"put new modules into a room: {sorted(entries)}"


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.name)
def test_each_room_has_a_page_that_names_its_modules(room):
    assert (room / "README.md").exists()
    for path in modules(room):
        # The page of the room, or that of a folder of it that the file is in.
        folders = [folder for folder in path.parents if folder == room or room in folder.parents]
        pages = [page for folder in folders if (page := folder / "README.md").exists()]
        assert any(path.name in page.read_text() for page in pages), f"{room.name}/README.md: {path.name} is missing"


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.name)
def test_each_room_has_a_folder_of_tests(room):
    assert list((ROOT / "tests" / room.name).glob("test_*.py")), f"tests/{room.name} has no tests"


def libraries(room):
    """The third-party packages that a room's files import."""
    names = set()
    for node in (node for path in room.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {PACKAGE.name}


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.name)
def test_contributing_names_the_libraries_of_each_room(room):
    row = re.search(rf"^\| \[{room.name}\].*\|([^|]*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert set(row[1].replace(",", " ").split()) == libraries(room)


def test_no_docstring_is_still_to_be_written():
    placeholder = "TODO" + "-DOC"
    files = [path for folder in ("axolotl_supertune", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert not [str(path) for path in files if placeholder in path.read_text()]


# Files outside tuner/quantization whose code may name a quantization library, and why. An entry that is not needed
# fails the test: remove it.
NAME_QUANTIZATION = {
    "bench/run.py": "lists versions of installed packages",
    "plugin/axolotl_compat.py": "a function of Axolotl has the library in its name",
    "plugin/plan/memory.py": "8-bit optimizers, which are the same library's",
    "plugin/quantized_base.py": "what Axolotl's load_in_4bit, load_in_8bit and bnb_config_kwargs mean",
}


def test_engines_are_named_in_their_room_only():
    """Elsewhere the code asks the `Engine` object: to add what differs between engines, add a method to it."""
    found = named_in(r"zero-?[123]|fsdp|deepspeed", outside="engines")
    assert not found, "move what an engine decides into axolotl_supertune/engines"


def test_quantization_libraries_are_named_in_their_folder_only():
    """Elsewhere the code asks the `Backend`: to add what differs between libraries, add a method to it."""
    found = named_in(r"bitsandbytes|bnb", outside="tuner/quantization")
    assert found == set(NAME_QUANTIZATION), "move what a library decides into axolotl_supertune/tuner/quantization"
