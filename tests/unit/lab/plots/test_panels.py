"""Figures show the numbers they are given, all of them, and legibly."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from math import nan

import matplotlib
import matplotlib.text
import numpy as np
import pandas
import pytest
from fake_figures import Figures, frame_of, pictures_of
from matplotlib import cbook
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from fissile.lab.budget_methods import METHODS
from fissile.lab.frame import cells, pick
from fissile.lab.plots import draw, numbers, style
from fissile.lab.plots.figure import laid_out_once
from fissile.lab.plots.panels import written
from fissile.lab.plots.style import look, wrapped
from fissile.lab.stats import LEVEL, line
from fissile.lab.studies import STUDIES
from fissile.lab.study import Curves, Equivalence, Heat, Lines, Matrices, Regression, Series, Study

pytestmark = pytest.mark.slow  # together: make quick leaves them out


@pytest.fixture(scope="module")
def drawn() -> dict[str, Figure]:
    return Figures()


def panels_of(study: Study, figure: Figure) -> list[tuple[object, matplotlib.axes.Axes]]:
    panels = [panel for row in study.figure for panel in row]
    return list(zip(panels, figure.axes, strict=False))


def found_in(study: Study, figure: Figure, kind: type) -> list[tuple[object, object]]:
    return [both for both in panels_of(study, figure) if isinstance(both[0], kind)]


def stars_in(axes: matplotlib.axes.Axes) -> set[tuple[str, float]]:
    marks = [one for one in axes.lines if str(one.get_gid()).startswith("star ")]
    return {(mark.get_gid().removeprefix("star "), mark.get_xdata()[0]) for mark in marks}


# --- every figure


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_every_study_has_a_figure_of_the_width_of_the_paper(study: Study, drawn) -> None:
    figure = drawn[study.id]
    assert figure.get_figwidth() in (3.25, 6.75)
    assert figure.get_figheight() < 9
    assert all(axes.has_data() for axes in figure.axes)


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_there_is_one_legend_with_every_arm_once(study: Study, drawn) -> None:
    figure = drawn[study.id]
    panels = [panel for row in study.figure for panel in row]
    own = [panel for panel, axes in panels_of(study, figure) if axes.get_legend() is not None]
    assert own == [panel for panel in panels if isinstance(panel, Curves)]  # times are no arms
    arms = {arm for panel in panels if isinstance(panel, Lines | Regression) for arm in panel.arms}
    arms |= {
        arm for panel in panels if isinstance(panel, Equivalence) for arm in ("dense", panel.arm)
    }
    if any(getattr(panel, "baseline", None) is not None for panel in panels):
        arms.add("dense")
    assert len(figure.legends) == any(not isinstance(one, Matrices | Heat) for one in panels)
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert len(labels) == len(set(labels))
    if not isinstance(panels[0], Series | Matrices):
        marks = {label for label in labels if label.startswith(("above dense", "below dense"))}
        assert set(labels) - marks == {look(arm).label for arm in arms}


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_no_words_touch(study: Study, drawn) -> None:
    assert_legible(drawn[study.id])


@pytest.mark.parametrize("name", ["cosine", "embed-clauses"])
def test_no_words_touch_on_the_long_axes_of_the_paper_s_own_grid(name: str) -> None:
    assert_legible(at_full_length(name))


@cache
def at_full_length(name: str) -> Figure:
    figure = draw(STUDIES[name], frame_of(STUDIES[name], "paper"))
    assert figure is not None
    return figure


def assert_legible(figure: Figure) -> None:
    renderer = FigureCanvasAgg(figure).get_renderer()
    words = []
    for axes in figure.axes:
        ticks = [one for one in axes.get_xticklabels() if one.get_text()]
        boxes = [one.get_window_extent(renderer) for one in ticks]
        assert all(first.x1 < second.x0 for first, second in pairwise(boxes))
        words += [axes.title, axes.xaxis.label, axes.yaxis.label]
    words += [text for legend in figure.legends for text in legend.get_texts()]
    shown = {one: one.get_window_extent(renderer) for one in words if one.get_text()}
    for (one, first), (other, second) in combinations(shown.items(), 2):
        assert not first.overlaps(second), (one.get_text(), other.get_text())
    for one, box in shown.items():
        inside = Bbox.intersection(box, figure.bbox)
        assert inside is not None, one.get_text()
        assert inside.bounds == pytest.approx(box.bounds), one.get_text()


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_nothing_to_show_is_no_figure(study: Study) -> None:
    frame = frame_of(study)
    for empty in (pandas.DataFrame(), frame.iloc[:0]):
        assert draw(study, empty) is None
        assert len(numbers(study, empty)) == 0
    assert draw(replace(study, figure=()), frame, pictures_of(study)) is None


@pytest.mark.parametrize("name", ["superposition", "interference", "clustered", "theory"])
def test_an_interrupted_run_draws_what_it_has(name: str) -> None:
    study = STUDIES[name]
    part = frame_of(study).sample(frac=0.4, random_state=2)
    part.iloc[:2, part.columns.get_loc("trial") + 1 :] = nan  # these have diverged
    pictures = dict(list(pictures_of(study).items())[1:])
    assert draw(study, part, pictures) is not None
    found = numbers(study, part)
    assert found["mean"].isna().tolist() == found["measure"].str.contains("~").tolist()


def test_an_arm_that_has_not_run_is_left_out() -> None:
    study = STUDIES["cosine"]
    frame = frame_of(study)
    for missing in ("dense", "random-4"):
        figure = draw(study, frame[frame["arm"] != missing])
        assert figure is not None
        shown = {bars.get_label() for axes in figure.axes for bars in axes.containers}
        labels = {text.get_text() for text in figure.legends[0].get_texts()}
        assert shown == {"dense", "clause-4", "random-4"} - {missing}
        assert look(missing).label not in labels
        assert (missing == "dense") <= (not any(stars_in(axes) for axes in figure.axes))


def test_the_user_s_own_settings_neither_matter_nor_change() -> None:
    study = STUDIES["capacity"]
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True}):
        figure = draw(study, frame_of(study))
        assert matplotlib.rcParams["font.size"] == 30
    assert figure is not None
    assert figure.axes[0].xaxis.label.get_size() == 8


# --- lines


@pytest.mark.parametrize("name", ["superposition", "interference", "capacity", "embed-neurons"])
def test_stars_stand_exactly_where_an_arm_differs_from_dense(name: str, drawn) -> None:
    study, any_star = STUDIES[name], False
    for panel, axes in found_in(study, drawn[name], Lines):
        part = cells(pick(frame_of(study), panel.where), panel.measure, [panel.along])
        sure = part[part["arm"].isin(panel.stars) & (part["p"] < LEVEL)]
        assert stars_in(axes) == set(zip(sure["arm"], sure[panel.along], strict=True))
        any_star |= len(sure) > 0
    assert any_star


def test_stars_of_one_place_stand_above_each_other_in_the_colours_of_their_arms() -> None:
    study = STUDIES["capacity"]
    frame = frame_of(study)
    rise = frame["arm"].map({"dense": 0.0, "clause-4": 5.0, "random-4": 4.0})
    figure = draw(study, frame.assign(capacity=frame["capacity"] + rise))
    assert figure is not None
    marks = [one for one in figure.axes[0].lines if str(one.get_gid()).startswith("star ")]
    assert len(marks) == 2 * frame["literals"].nunique()
    low, high = marks[:2]
    tops = [mark.get_transform().transform(mark.get_xydata())[0, 1] for mark in (low, high)]
    assert tops[1] - tops[0] > 5 * figure.dpi / 72
    assert [mark.get_gid() for mark in (low, high)] == ["star random-4", "star clause-4"]
    assert [m.get_color() for m in (low, high)] == [
        look("random-4").colour,
        look("clause-4").colour,
    ]


def test_the_dense_network_is_a_dashed_black_line_across(drawn) -> None:
    for name in ("superposition", "interference", "embed-clauses"):
        for panel, axes in found_in(STUDIES[name], drawn[name], Lines):
            across = [one for one in axes.lines if one.get_label() == "baseline"]
            assert [list(one.get_ydata()) for one in across] == (
                [] if panel.baseline is None else [[panel.baseline] * 2]
            )
            assert all(one.is_dashed() and one.get_color() == "#000000" for one in across)


def test_points_and_bars_are_means_and_standard_errors(drawn) -> None:
    study = STUDIES["capacity"]
    part = cells(frame_of(study), "capacity", ["literals"])
    (_, axes), *_ = panels_of(study, drawn["capacity"])
    assert [bars.get_label() for bars in axes.containers] == ["dense", "clause-4", "random-4"]
    for bars in axes.containers:
        mine = part[part["arm"] == bars.get_label()]
        points, _, (segments,) = bars.lines
        assert points.get_ydata() == pytest.approx(mine["mean"].to_numpy())
        reach = [high - low for (_, low), (_, high) in segments.get_segments()]
        assert reach == pytest.approx(2 * mine["error"].to_numpy())
        low, high = axes.get_ylim()
        assert low < (mine["mean"] - mine["error"]).min()
        assert high > (mine["mean"] + mine["error"]).max()


def test_panels_of_a_row_with_one_measure_share_its_axis(drawn) -> None:
    first, second, third = drawn["interference"].axes[:3]
    assert first.get_ylim() == second.get_ylim() != third.get_ylim()
    labels = [axes.get_ylabel() for axes in (first, second, third)]
    assert labels == ["Capacity, fold change", "", "Relative improvement (%)"]


def test_ticks_are_at_the_values_and_few_have_a_label() -> None:
    values = frame_of(STUDIES["embed-clauses"], "paper")["clauses"].unique()
    assert len(values) > 8
    for axes in at_full_length("embed-clauses").axes:
        assert list(axes.get_xticks()) == sorted(values)
        labels = [one.get_text() for one in axes.get_xticklabels() if one.get_text()]
        assert labels[0] == "4"
        assert labels[-1] == "32"
        assert len(labels) <= 8


def test_arms_differ_without_colour_too() -> None:
    arms = ("dense", "clause-2", "clause-4", "random-2", "random-4", "gram-2", "gram-4")
    looks = [look(arm) for arm in arms]
    assert len({(one.marker, one.filled, str(one.line)) for one in looks}) == len(arms)
    assert [look(arm).label for arm in ("dense", "clause-4", "random-2", "gram-4")] == [
        "dense", "clause split, α = 4", "random split, α = 2", "Gram split, α = 4",
    ]  # fmt: skip
    assert look("halves-8").label == "halves split, α = 8"


@pytest.mark.parametrize("name", ["frontier-coarse", "ablation-coarse"])
def test_methods_differ_without_colour_too_and_the_recipe_is_bold(name: str, drawn) -> None:
    arms = {arm for row in STUDIES[name].figure for panel in row for arm in panel.arms}
    looks = [look(arm) for arm in arms]
    assert len({(one.marker, one.filled, str(one.line)) for one in looks}) == len(arms) > 14
    assert all("split, α" not in one.label for one in looks)
    assert [one.label for one in looks if one.bold] == ["recipe"]
    words = {text.get_text(): text for text in drawn[name].legends[0].get_texts()}
    assert {label for label, text in words.items() if text.get_weight() == "bold"} == {"recipe"}
    curves = {bars.get_label(): bars.lines[0] for bars in drawn[name].axes[0].containers}
    thick = curves.pop("recipe").get_linewidth()
    assert all(one.get_linewidth() < thick for one in curves.values())


def test_every_method_has_a_look_of_its_own() -> None:
    assert set(style.METHODS) | {"dense"} == set(METHODS)
    assert len({one.label for one in style.METHODS.values()}) == len(METHODS) - 1


def test_a_logarithmic_axis_has_its_ticks_at_the_budgets(drawn) -> None:
    (axes,) = drawn["frontier-coarse"].axes
    assert axes.get_xscale() == "log"
    assert [one.get_text() for one in axes.get_xticklabels()] == [
        "1,086", "2,685", "6,416", "16,010", "39,995", "100,224",
    ]  # fmt: skip
    assert len(axes.get_xticks(minor=True)) == 0


def test_an_axis_begins_below_the_arm_it_names_but_hides_no_arm_wholly() -> None:
    study, frame = STUDIES["frontier-coarse"], frame_of(STUDIES["frontier-coarse"])
    part = frame[frame["arm"].isin(["recipe", "dense", "l1"])]

    def begins(flat: float) -> float:
        others = np.where(part["arm"] == "l1", flat, 10.0 + part["neurons"] * 0.4)  # dense: to 85
        accuracy = np.where(part["arm"] == "recipe", 80.0, others)
        figure = draw(study, part.assign(accuracy=accuracy))
        assert figure is not None
        return figure.axes[0].get_ylim()[0]

    assert 79 < begins(82.0) < 80
    assert 25 < begins(30.0) < 30


def test_names_from_data_are_drawn_as_they_are() -> None:
    evil = r"$\frac$ costs \$5 and $\alpha$"
    study = STUDIES["capacity"]
    figure = draw(study, frame_of(study), note=f"On {evil}")
    assert figure is not None
    assert figure.get_suptitle().count(r"\$") == figure.get_suptitle().count("$") == 5
    for text in (style.plain(evil), style.look(f"{evil}-2").label, style.named(evil)):
        assert not cbook.is_math_text(text)
        assert evil.replace(" ", "") in "".join(text.replace(r"\$", "$").split())
    assert "\x1b" not in style.plain("\x1b[31m")


def test_long_names_break_into_lines_of_one_length() -> None:
    assert wrapped("Absolute cosine, fold change", 27) == "Absolute cosine,\nfold change"
    assert wrapped("coverage, alpha 2", 12) == "coverage,\nα\xa0=\xa02"
    assert wrapped("", 12) == ""


# --- heat-maps


def test_heat_maps_say_their_means_on_one_scale_around_zero(drawn) -> None:
    study, figure = STUDIES["superposition"], drawn["superposition"]
    frame, limits = frame_of(study), []
    for panel, axes in found_in(study, figure, Heat):
        part = cells(frame, panel.measure, [panel.down, panel.across])
        part = part[part["arm"] == panel.arm].sort_values([panel.down, panel.across])
        said = sorted(axes.texts, key=lambda text: text.get_position()[::-1])
        assert [text.get_text() for text in said] == [written(mean) for mean in part["mean"]]
        (image,) = axes.images
        assert np.asarray(image.get_array()).ravel() == pytest.approx(part["mean"].to_numpy())
        limits.append(image.get_clim())
    assert limits[0] == limits[1] == (-limits[0][1], limits[0][1])
    assert len(figure.axes) == 6 + 1  # one bar for both


def test_a_cell_that_is_missing_has_no_number() -> None:
    study = STUDIES["superposition"]
    frame = frame_of(study)  # two by two
    figure = draw(study, frame[(frame["clauses"] != 4) | (frame["neurons"] != 8)])
    assert figure is not None
    for _, axes in found_in(study, figure, Heat):
        assert len(axes.texts) == 3
        assert np.isnan(np.ma.filled(axes.images[0].get_array(), nan)).sum() == 1


def test_a_cell_is_written_with_one_decimal_and_a_minus() -> None:
    assert [written(value) for value in (-0.04, 0.0, -1.25, 12.34)] == [
        "0.0",
        "0.0",
        "−1.2",
        "12.3",
    ]


# --- regressions


def test_regressions_say_the_r2_of_the_line_they_draw(drawn) -> None:
    study = STUDIES["interference"]
    frame = frame_of(study)
    for panel, axes in found_in(study, drawn["interference"], Regression):
        fits = {}
        for arm in panel.arms:
            part = pick(frame, panel.where, [arm]).groupby(panel.along)
            fits[arm] = line(part[panel.x].mean(), part[panel.y].mean())
        assert [text.get_text() for text in axes.texts] == [
            f"R² = {fit.r2:.2f}" for fit in fits.values()
        ]
        for arm, fit in fits.items():
            (mine,) = [one for one in axes.lines if one.get_gid() == f"fit {arm}"]
            x, y = np.array(mine.get_xdata()), np.array(mine.get_ydata())
            assert y == pytest.approx(fit.intercept + fit.slope * x)
            assert mine.get_linestyle() == ("--" if arm.endswith("-2") else "-")


# --- series


def test_series_are_lines_for_closed_forms_and_markers_for_simulations(drawn) -> None:
    study, figure = STUDIES["theory"], drawn["theory"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["exact", "simulated", "bound", "approximation"]
    for panel, axes in found_in(study, figure, Series):
        assert (axes.get_yscale() == "log") == panel.log
        curves = {one.get_label(): one for one in axes.lines if one.get_label() in panel.measures}
        assert set(curves) == {one for one in panel.measures if not one.endswith("simulated")}
        assert all(np.all(np.asarray(one.get_ydata()) >= 0) for one in curves.values())
        simulated = {bars.get_label() for bars in axes.containers}
        assert simulated == set(panel.measures) - set(curves)


# --- matrices


def test_matrices_cross_out_what_is_missing_and_part_clauses_and_parents(drawn) -> None:
    study, figure = STUDIES["clustered"], drawn["clustered"]
    pictures = pictures_of(study)
    grid = np.array(figure.axes[:9], dtype=object).reshape(3, 3)
    for row, (arm, weight) in zip(grid, pictures.items(), strict=True):
        gram, clustered, first = row
        assert gram.get_ylabel() == look(arm).label
        columns, rows, crosses = first.collections
        assert len(columns.get_segments()) == 7
        assert len(rows.get_segments()) == (7 if arm != "dense" else 0)
        assert len(crosses.get_offsets()) == np.isnan(weight).sum()
        known = np.nan_to_num(weight)
        assert np.asarray(gram.images[0].get_array()) == pytest.approx(known.T @ known)
        # The same matrix in another order.
        values = [np.sort(np.asarray(one.images[0].get_array()), None) for one in (gram, clustered)]
        assert values[0] == pytest.approx(values[1])
    for column in grid.T:
        limits = {axes.images[0].get_clim() for axes in column}
        assert len(limits) == 1
        low, high = limits.pop()
        assert low == -high


def test_clusters_stand_together() -> None:
    study = STUDIES["clustered"]
    clauses = np.random.default_rng(0).permutation(32) % 8
    weight = np.eye(8)[:, clauses]
    figure = draw(study, pandas.DataFrame(), {"dense": weight})
    assert figure is not None
    blocks = figure.axes[1]
    assert np.asarray(blocks.images[0].get_array()) == pytest.approx(
        np.kron(np.eye(8), np.ones((4, 4)))
    )
    edges = [path[0][0] for path in blocks.collections[0].get_segments()]
    assert edges == [4 * number - 0.5 for number in range(1, 8)]


def test_a_layout_is_kept_to_nine_digits():
    figure = Figure(figsize=(5, 3), layout="constrained")
    for axes in figure.subplots(1, 3):
        axes.set(title="A title", ylabel="accuracy")
    for axes in laid_out_once(figure).axes:
        bounds = axes.get_position(original=True).bounds
        assert bounds == pytest.approx([round(one, 9) for one in bounds], abs=1e-15, rel=0)
