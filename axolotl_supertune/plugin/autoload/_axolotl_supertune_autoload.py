"""Start-up hooks: runs at every start of Python (through the `.pth` beside it) and waits for two libraries.

- When `peft` has been imported, the SUPRA method is registered, so that `PeftModel.from_pretrained` and
  `lm_eval --model_args peft=…` load our adapters.
- When `lm_eval.tasks` has been imported, our task folder is added to every TaskManager, so that
  `--tasks supertune_math` is found.

Uses only the standard library, imports no other library before it is used, and lets no exception out.
AXOLOTL_SUPERTUNE_AUTOLOAD=0 switches it off.
"""

from __future__ import annotations

import functools
import os
import sys

TYPE_CHECKING = False  # typing itself is slow to import, and this file runs at every start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _after_peft(module: Any) -> None:
    import axolotl_supertune.tuner  # noqa: F401 (registers SUPRA)


def _after_lm_eval_tasks(module: Any) -> None:
    manager = sys.modules.get("lm_eval.tasks.manager", module)
    if hasattr(manager, "discover_plugin_task_paths"):
        return  # this lm_eval reads our entry point itself
    from axolotl_supertune.tasks import TASK_FOLDER

    task_manager = module.TaskManager
    original = task_manager.__init__
    if getattr(original, "_axolotl_supertune", False):
        return

    @functools.wraps(original)
    def init(self: Any, verbosity: Any = None, include_path: Any = None, *args: Any, **kwargs: Any) -> None:
        given = (
            []
            if include_path is None
            else [include_path]
            if isinstance(include_path, (str, os.PathLike))
            else include_path
        )
        paths = [*given] if str(TASK_FOLDER) in map(str, given) else [str(TASK_FOLDER), *given]
        original(self, verbosity, paths, *args, **kwargs)

    init._axolotl_supertune = True  # type: ignore[attr-defined]
    task_manager.__init__ = init


_HOOKS = {"peft": _after_peft, "lm_eval.tasks": _after_lm_eval_tasks}


class _PostImport:
    """An import finder that leaves finding to the others, and runs a hook after the module's own code."""

    def __init__(self) -> None:
        self._finding: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _HOOKS or name in self._finding:
            return None
        self._finding.add(name)
        try:
            for finder in list(sys.meta_path):
                spec = getattr(finder, "find_spec", lambda *_: None)(name, path, target) if finder is not self else None
                if spec is not None:
                    self._wrap(spec, _HOOKS[name])
                    return spec
            return None
        finally:
            self._finding.discard(name)

    @staticmethod
    def _wrap(spec: Any, hook: Callable[[Any], None]) -> None:
        loader = spec.loader
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: Any) -> None:
            original(module)
            try:
                hook(module)
            except Exception as error:
                print(f"axolotl-supertune: not registered with {module.__name__}: {error!r}", file=sys.stderr)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # the loader takes no attributes: no hook for this module
            return


def install() -> None:
    """Install the import finder, once, unless it is switched off."""
    if os.environ.get("AXOLOTL_SUPERTUNE_AUTOLOAD", "1").lower() in ("0", "false", "no", "off"):
        return
    if any(type(finder).__name__ == "_PostImport" for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _PostImport())


try:
    install()
except Exception as error:
    print(f"axolotl-supertune: autoload failed: {error!r}", file=sys.stderr)
