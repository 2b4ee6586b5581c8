"""The figures of a report, with as many methods as a real grid has and with a single one."""

import itertools

import matplotlib.colors
import numpy as np
import pytest
from grid_records import make_run, make_scores, save_records

from axolotl_supertune.grid.report.analysis import analyze
from axolotl_supertune.grid.report.figures.cost import cost
from axolotl_supertune.grid.report.figures.curves import curves
from axolotl_supertune.grid.report.figures.figures import FORMATS, make_figures, render
from axolotl_supertune.grid.report.figures.learning_rates import learning_rates
from axolotl_supertune.grid.report.figures.style import MAX_METHODS, families, groups, styles

FAMILIES = {
    "": ("full", "rosa", "sift-top"),
    "magnitude": ("magnitude-bottom", "magnitude-top"),
    "super": ("super-bottom", "super-bottom-wide", "super-hybrid-0.3", "super-random", "super-top", "super-top-wide"),
    "supra": ("supra-0.3", "supra-0.5", "supra-0.8"),
    "supra-mag": ("supra-mag-0.3", "supra-mag-0.5", "supra-mag-0.8"),
}
METHODS = ("lora", *itertools.chain(*FAMILIES.values()))
RATES = (1e-3, 5e-3, 1e-2)


def nlls(at):
    """NLLs by rate, lowest at the second, different for each method."""
    return 0.85 + at / 1000, 0.80 + at / 1000, 0.90 + at / 1000


@pytest.fixture
def find_in(tmp_path):
    """A function (*(run, scores or None)) → findings."""

    def findings(*records):
        return analyze(save_records(tmp_path / "runs", *records), resamples=100)

    return findings


def many(methods=METHODS, epochs=(1,), second_seeds=("lora", "full", "super-top"), changed=()):
    """Records of many methods, with second seeds of some; `changed` maps (method, rate) to another validation NLL."""
    records = []
    for (at, method), epoch in itertools.product(enumerate(methods), epochs):
        for rate, nll in zip(RATES, nlls(at), strict=True):
            run = make_run(method, rate, epochs=epoch, nll=dict(changed).get((method, rate), nll), peak_memory_gib=4.7)
            # Twenty close accuracies.
            records.append((run, make_scores(run.key, 0.4) if rate == 5e-3 else None))
        if method in second_seeds:
            run = make_run(method, 5e-3, seed=1, epochs=epoch, nll=nlls(at)[1], peak_memory_gib=4.7)
            # Of full fine-tuning it was not scored.
            records.append((run, make_scores(run.key, 0.4) if method != "full" else None))
    return records


@pytest.fixture
def eighteen(find_in):
    return find_in(*many())


def named(panel):
    """Lines of a panel that have a label, by method."""
    lines = {line.get_label().split("  ")[0]: line for line in panel.get_lines()}
    return {name: line for name, line in lines.items() if not name.startswith("_")}


def looks(line):
    return matplotlib.colors.to_hex(line.get_color()), line.get_linestyle(), line.get_marker()


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        (METHODS, {method: family for family, members in FAMILIES.items() for method in members} | {"lora": ""}),
        (("supra-0.3", "supra-mag-0.3", "supra-mag-0.5"), {"supra-0.3": "", "supra-mag-0.3": "supra-mag"}),
        (("a-1", "a-2", "a-b"), {"a-1": "a", "a-2": "a", "a-b": "a"}),
        (("r8", "r16", "0.3", "full"), {"r8": "r", "r16": "r", "0.3": "", "full": ""}),
    ],
)
def test_families_are_told_from_names(methods, expected):
    assert families(methods).items() >= expected.items()


@pytest.mark.parametrize("epochs", [(1,), (1, 3)])
def test_each_of_many_methods_looks_its_own_way(find_in, epochs):
    findings = find_in(*many(epochs=epochs))
    made = styles(findings)
    assert len(made) == len(set(made.values())) == 18 * len(epochs)
    assert {key for key, style in made.items() if style.color == "black"} == {("lora", each) for each in epochs}
    shown = groups(findings)
    assert [(group.title, group.methods) for group in shown] == [
        (name or "others", FAMILIES[name]) for name in FAMILIES
    ]
    for group in shown:
        assert len({made[method, 1].color for method in group.methods}) == len(group.methods)


def test_names_without_a_family_share_panels_that_are_not_crowded(find_in):
    findings = find_in(*((make_run(f"{letter}x", 1e-3), None) for letter in "abcdefghijklm"))
    assert [len(group.methods) for group in groups(findings)] == [5, 5, 3]
    assert len(set(styles(findings).values())) == 13
    assert max(5, 5, 3) <= MAX_METHODS


def test_few_methods_share_one_panel(find_in):
    findings = find_in(*many(METHODS[: MAX_METHODS + 1]))
    assert [group.title for group in groups(findings)] == [""]
    assert len(curves(findings).axes) == 2
    assert len(learning_rates(findings).axes) == 1


def test_a_method_looks_the_same_in_every_figure(eighteen):
    made = make_figures(eighteen)
    expected = {
        method: (matplotlib.colors.to_hex(style.color), style.marker) for (method, _), style in styles(eighteen).items()
    }
    for name in ("curves", "learning_rates", "cost"):
        findings = [(method, looks(line)) for panel in made[name].axes for method, line in named(panel).items()]
        assert {method for method, _ in findings} == set(METHODS), name
        for method, (color, _, marker) in findings:
            assert (color, marker) == expected[method], name


def test_every_panel_shows_the_reference_and_all_others_in_grey(eighteen):
    panels = [*curves(eighteen).axes, *learning_rates(eighteen).axes]
    shown = [panel for panel in panels if panel.get_visible()]
    assert len(shown) == 3 * len(FAMILIES)
    for panel in shown:
        assert "lora" in named(panel)
        grey = [line for line in panel.get_lines() if line.get_color() == "0.82"]
        assert len(grey) == len(METHODS) - len(named(panel))


@pytest.mark.parametrize("diverged", [1.39, 9.0, 1e6, float("nan"), float("inf")])
def test_what_diverged_does_not_stretch_the_axis_and_is_told(find_in, diverged):
    findings = find_in(*many(changed={("lora", 1e-2): diverged}.items()))
    figure = learning_rates(findings)
    panel = figure.axes[0]
    low, high = panel.get_ylim()
    assert low < 0.80
    assert 0.917 < high < 0.93
    for result in findings.results:
        assert low < result.choice.validation_nll < high
    told = f"lora at 1e-2 ({diverged:.2f})" if np.isfinite(diverged) else "lora at 1e-2 (diverged)"
    assert told in figure.get_supxlabel().replace("\n", " ")
    assert "Before training: 1.40" in figure.get_supxlabel()
    assert panel.get_lines()
    at_edge = [line for line in panel.get_lines() if line.get_marker() == "^" and line.get_color() == "black"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in at_edge] == [([1e-2], [high])]
    assert not at_edge[0].get_clip_on()


def test_without_an_evaluation_before_training_a_third_may_diverge(find_in):
    late = [(20, 1.0), (40, 5.0)]
    records = [
        (make_run(m, r, eval_losses=late if r == 1e-2 else [(40, n)]), None)
        for m in ("lora", "super")
        for r, n in zip(RATES, nlls(0), strict=True)
    ]
    figure = learning_rates(find_in(*records))
    assert figure.axes[0].get_ylim()[1] < 0.9
    assert "lora at 1e-2 (5.00), super at 1e-2 (5.00)" in figure.get_supxlabel()
    assert "Before training" not in figure.get_supxlabel()


def test_what_lies_above_is_counted_where_it_is_much(find_in):
    figure = learning_rates(find_in(*many(changed={(method, 1e-2): 3.0 for method in METHODS}.items())))
    assert "Triangles: 18 means above the axis" in figure.get_supxlabel()
    assert len(figure.get_supxlabel()) < 300


@pytest.mark.parametrize("lora", [1.0, 1.6])
def test_a_rate_that_is_chosen_is_shown_though_no_training_were_better(find_in, lora):
    figure = learning_rates(find_in((make_run("lora", 1e-3, nll=lora), None), (make_run("worse", 1e-3, nll=1.7), None)))
    (panel,) = figure.axes
    assert panel.get_ylim()[0] < min(lora, 1.4)
    assert panel.get_ylim()[1] > 1.7
    assert [text.get_text().strip() for text in panel.texts] == ["before training"]
    assert "above the axis" not in figure.get_supxlabel()


def test_rings_are_around_the_chosen_rates(eighteen):
    panels = [panel for panel in learning_rates(eighteen).axes if panel.get_visible()]
    for group, panel in zip(groups(eighteen), panels, strict=True):
        rings = [line for line in panel.get_lines() if line.get_fillstyle() == "none"]
        assert len(rings) == len(group.methods) + 1
        assert {line.get_xdata()[0] for line in rings} == {5e-3}
        assert all(label.get_text().endswith("  5e-3") for label in panel.get_legend().get_texts())


def test_losses_are_smoothed_over_a_tenth_and_averaged_over_seeds(find_in):
    """Seed 1 logged at other steps: its losses are interpolated at the steps of the longer run."""
    losses = [[(step, float(step % 20)) for step in range(10, 410, 10)], [(step, 7.0) for step in range(20, 400, 20)]]
    evaluations = [[(0, 1.4), (100, 1.2), (200, 1.0)], [(0, 1.4), (90, 1.3), (190, 1.1)]]
    runs = [
        make_run("lora", 1e-3, seed, losses=losses[seed], eval_losses=evaluations[seed], nll=0) for seed in range(2)
    ]
    training, validation = (
        named(panel)["lora"] for panel in curves(find_in(*zip(runs, (None, None), strict=True))).axes
    )
    steps = list(range(30, 390, 10))
    assert list(training.get_xdata()) == steps
    # Of five points in turn 10 and 0 two or three are 10.
    expected = [(np.mean([(step + each) % 20 for each in (-20, -10, 0, 10, 20)]) + 7) / 2 for step in steps]
    assert list(training.get_ydata()) == pytest.approx(expected)
    assert list(validation.get_xdata()) == [100, 200]
    assert list(validation.get_ydata()) == pytest.approx([(1.2 + 1.28) / 2, (1.0 + 1.1) / 2])


def test_the_fall_at_the_start_does_not_stretch_the_axis_of_losses(find_in):
    losses = [(step, 1 + 8 * (step == 10)) for step in range(10, 210, 10)]
    for panel in curves(find_in((make_run("lora", 1e-3, losses=losses), None))).axes[:1]:
        assert panel.get_ylim()[1] < 1.1


@pytest.mark.parametrize("losses", [[], [(40, 1.2)], [(40, float("nan"))]])
def test_one_method_with_one_evaluation_is_drawn(find_in, losses):
    run = make_run("lora", 1e-3, losses=losses, eval_losses=[(40, 1.1)], train_seconds=None, peak_memory_gib=None)
    made = make_figures(find_in((run, make_scores(run.key, 0.5))))
    assert set(made) == {"curves", "learning_rates", "cost"}
    training, validation = made["curves"].axes
    assert list(named(validation)["lora"].get_xydata()[0]) == [40, 1.1]
    assert looks(named(validation)["lora"])[2] == "*"
    if losses == [(40, 1.2)]:
        assert looks(named(training)["lora"])[2] == "*"
    else:
        assert [text.get_text() for text in training.texts] == ["not logged"]
    (rates,) = made["learning_rates"].axes
    assert rates.get_xlim()[0] < 1e-3 < rates.get_xlim()[1]
    assert rates.get_ylim()[0] < 1.1 < rates.get_ylim()[1]
    assert [text.get_text() for panel in made["cost"].axes for text in panel.texts] == ["not measured"] * 2
    for name, figure in made.items():
        assert len(render(figure, name, "svg")) > 5000


def test_one_seed_is_told_from_several(eighteen):
    for panel in cost(eighteen).axes:
        filled = {method for method, line in named(panel).items() if line.get_fillstyle() == "full"}
        assert filled == {"lora", "super-top"}


def test_the_legend_of_costs_tells_every_marker(eighteen):
    """Colour and marker together are unique, so that no name has to be written beside a point."""
    for panel in cost(eighteen).axes:
        drawn = {method: looks(line) for method, line in named(panel).items()}
        assert len(set(drawn.values())) == len(METHODS)
        if legend := panel.get_legend():
            handles = dict(zip([text.get_text() for text in legend.get_texts()], legend.legend_handles, strict=True))
            assert {method: looks(handle) for method, handle in handles.items()} == drawn
    assert cost(eighteen).axes[1].get_legend() is not None


def test_epochs_have_rows_and_lines_of_their_own(find_in):
    findings = find_in(*many(("lora", "super"), epochs=(1, 3)))
    panels = cost(findings).axes
    assert [sorted(named(panel)) for panel in panels] == [
        [f"{method} ({epochs} epochs)" for method in ("lora", "super")] for epochs in (1, 1, 3, 3)
    ]
    lines = {name: looks(line)[1] for name, line in named(curves(findings).axes[1]).items()}
    assert lines["lora (1 epochs)"] == lines["super (1 epochs)"] != lines["lora (3 epochs)"]


def test_equal_findings_give_equal_files(eighteen):
    for kind in FORMATS:
        assert render(cost(eighteen), "cost", kind) == render(cost(eighteen), "cost", kind)
