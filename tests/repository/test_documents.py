"""What the pages point to is there: files, headings, commands, modules. Pages of a folder begin with a command."""

import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "axolotl_supertune"
PAGES = sorted([*PACKAGE.glob("*/**/*.md"), *(ROOT / "examples").glob("**/README.md"), *ROOT.glob("tests/README.md")])
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", PACKAGE / "README.md", *PAGES]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
MODULE = re.compile(r"(?<![\w./-])axolotl_supertune(?!\.(?:pth|start)\b)(?:\.[A-Za-z_]\w*)+")
IMPORT = re.compile(r"^from (axolotl_supertune[\w.]*) import \(?([\w, ]+)", re.MULTILINE)
FILE = re.compile(r"(?<![\w./-])(?:axolotl_supertune|tests|examples)/[\w./-]*\w")


def anchors(text):
    """The anchors that GitHub gives to the headings of a page."""
    headings = HEADING.findall(FENCED.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code(text):
    """The lines of a page that are code: of fenced and indented blocks, and what stands between backticks."""
    lines = []
    for language, block in FENCED.findall(text):
        if language in ("", "bash", "sh"):
            lines += re.sub(r" *\\\n *", " ", block).splitlines()
    prose = FENCED.sub("", text)
    lines += [line.strip() for line in re.sub(r" *\\\n *", " ", prose).splitlines() if line.startswith("    ")]
    return lines + [" ".join(span.split()) for span in INLINE.findall(prose)]


def commands(text):
    """The words of each command of a page, without comments and without what is piped or redirected."""
    for line in code(text):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # prose between backticks
            continue
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            words.pop(0)
        end = next((at for at, word in enumerate(words) if word in ("|", "&&", ";", ">", "…")), len(words))
        if words[:end]:
            yield words[:end]


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_a_page_begins_with_a_command(path):
    lines = path.read_text().splitlines()[:10]
    begins = any(re.match("    |```(bash|python)$", line) for line in lines)
    assert begins, f"{path.name}: no command in the first ten lines"


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_lead_to_files_and_headings(path):
    text = path.read_text()
    for link in LINK.findall(FENCED.sub("", text)):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), f"{path.name}: {link}: there is no such file"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{path.name}: {link}: there is no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_modules_and_files_that_are_named_are_there(path):
    text = path.read_text()
    for name in set(MODULE.findall(text)):
        assert resolves(name), f"{path.name}: {name} is no module and no attribute of one"
    for module, names in IMPORT.findall(text):
        for name in names.replace(" ", "").split(","):
            assert resolves(f"{module}.{name}"), f"{path.name}: {module} has no {name}"
    for name in set(FILE.findall("\n".join(code(text)))):
        assert (ROOT / name).exists(), f"{path.name}: there is no {name}"


def resolves(name):
    """Whether a dotted name is a module, or an attribute of one."""
    module, _, attribute = name.rpartition(".")
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except ModuleNotFoundError:
        return False
    return hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_commands_that_are_named_exist_with_their_options(path):
    for words in commands(path.read_text()):
        if words[:2] == ["axolotl", "supertune"]:
            from axolotl_supertune.commands.cli import supertune

            check(supertune, words[2:], path)
        elif words[:2] == ["python", "-m"] and words[2:] and words[2].startswith("axolotl_supertune"):
            assert resolves(words[2]), f"{path.name}: {' '.join(words)}: there is no such module"
            if words[2] == "axolotl_supertune.tasks":
                check(importlib.import_module("axolotl_supertune.tasks.__main__").main, words[3:], path)
        elif words[0] in ("bash", "python") and len(words) > 1 and re.match(r"(tests|examples)/", words[1]):
            assert (ROOT / words[1]).is_file(), f"{path.name}: {' '.join(words)}: there is no {words[1]}"
            assert words[1] != "tests/run.sh" or "--quick" not in words[3:], "it is the first argument"


def check(command, words, path):
    """The words name a subcommand of `command`, or nothing, and options that it has."""
    context = click.Context(command)
    if isinstance(command, click.Group) and words and re.fullmatch(r"[a-z][\w-]*", words[0]):
        subcommand = command.get_command(context, words[0])
        assert subcommand is not None, f"{path.name}: {command.name} has no command {words[0]}"
        return check(subcommand, words[1:], path)
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("--") and word != "--help":
            assert word.partition("=")[0] in options, f"{path.name}: {command.name} has no option {word}"


def test_the_readme_is_a_page():
    """A new user reads it in ten minutes; what is longer goes into a room's page."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200
