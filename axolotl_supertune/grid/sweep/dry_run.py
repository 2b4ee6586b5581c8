"""What a sweep would do, without doing it: its runs with their actions, and why some would be refused."""

from collections.abc import Iterator
from typing import Any

from ...method.config_error import MissingFileError
from ...plugin import validation
from ...plugin.plan import plan as planning
from ...plugin.plan.data_checks import Findings, data_findings, is_here
from ..run_files import RunKey
from .run_jobs import without_record
from .state import SweepState

Line = tuple[str, str, str, str]
"""Stage, run, status and action."""


def list_runs(state: SweepState, *, retry_failed: bool) -> str:
    """One line per run with stage, folder, status and action, as far as they are known before training, and a total.

    Raises:
        GridError: see `SweepState.check`.
    """
    state.check()
    trained = all(state.status(key) in ("done", "failed") for key in state.grid.keys)
    lines = [*_training_lines(state, trained, retry_failed), *_scoring_lines(state, trained)]
    width = max(len(run) for _, run, _, _ in lines)
    shown = [f"{stage:<13}  {run:<{width}}  {status:<7}  {action}".rstrip() for stage, run, status, action in lines]
    missing = sum(1 for *_, action in lines if action.startswith(("train", "go on")))
    runs = "run" if missing == 1 else "runs"
    return "\n".join([*shown, f"{missing} {runs} to train, {len(state.done())} done, in {state.runs_dir}"])


def _training_lines(state: SweepState, trained: bool, retry_failed: bool) -> Iterator[Line]:
    """The runs of the first stage, then those with further seeds, which are known once the first stage is trained."""

    def line(stage: str, key: RunKey) -> Line:
        return stage, str(key.folder), state.status(key), state.action(key, retry_failed=retry_failed)

    for key in state.grid.keys:
        yield line("training", key)
    if trained:
        for key in state.further_seeds():
            yield line("further seeds", key)
        return
    chosen = state.grid.chosen
    if seeds := [seed for seed in chosen.seeds if seed not in state.grid.seeds]:
        methods = [*chosen.methods, *([f"the {chosen.leading} leading"] if chosen.leading else [])]
        runs = f"seeds {', '.join(map(str, seeds))} of {', '.join(methods)}"
        yield "further seeds", runs, "", "when training has ended"


def _scoring_lines(state: SweepState, trained: bool) -> Iterator[Line]:
    if state.grid.score.runs == "none":
        return
    keys: list[RunKey | None] = [None, *(state.to_score() if trained else [])]
    for key in keys:
        status, action = ("done", "") if state.scores(key) is not None else ("", "score")
        yield "scoring", str(key.folder) if key else "base", status, action
    if not trained:
        yield "scoring", f"{state.grid.score.runs} runs", "", "when training has ended"


def foresee(state: SweepState, *, retry_failed: bool) -> Findings:
    """Why missing runs would be refused, and what could not be checked, each with the methods that it is about.

    The same checks as `axolotl supertune plan`, on local files: no weights are loaded and nothing is downloaded.
    """
    to_train: dict[tuple[str, float], RunKey] = {}  # one run of each method and number of epochs
    for key in state.grid.keys:
        if state.action(key, retry_failed=retry_failed):
            to_train.setdefault((key.method, key.epochs), key)
    methods_of: dict[tuple[str, str], list[str]] = {}  # by kind and message
    texts_read: dict[str, Findings] = {}
    for key in to_train.values():
        shared_norms = state.settings.norms(key)
        is_calibrated = shared_norms is not None and shared_norms.is_file()
        settings = state.settings.of(key) if is_calibrated else state.settings.uncalibrated(key)
        checked = _check_run(without_record(settings), texts_read)
        for kind in ("refusals", "unchecked"):
            for message in getattr(checked, kind):
                methods = methods_of.setdefault((kind, message), [])
                methods += [key.method] if key.method not in methods else []
    method_count = len({method for method, _ in to_train})
    combined = Findings()
    for (kind, message), methods in methods_of.items():
        prefix = "" if len(methods) == method_count else f"{', '.join(methods)}: "
        getattr(combined, kind).append(prefix + message)
    return combined


def _check_run(settings: dict[str, Any], texts_read: dict[str, Findings]) -> Findings:
    """Check a run's YAML; `texts_read` keeps the results on calibration texts for further runs."""
    base = settings["base_model"]
    if settings.get("adapter") not in validation.ADAPTERS:
        return data_findings(settings)
    if not is_here(base, ("config.json",), settings.get("revision_of_model")):
        checked = data_findings(settings)
        checked.unchecked.append(f"base_model: the config of {base}, which lists the layers, is not here")
        return checked
    try:
        plan = planning.make(settings, gpus=1, texts_read=texts_read)
    except (ValueError, MissingFileError) as error:
        return Findings([str(error)])
    return Findings(plan.refusals, plan.unchecked)
