"""What the documentation says of the frontier is what the committed results hold."""

import json
from pathlib import Path

import matplotlib
import pytest

from fissile.bank.sparse import plan as presets
from fissile.lab.budget_methods import CONTENDERS, SETTINGS
from fissile.lab.studies.frontier import FRONTIERS
from fissile.lab.trial import Contender

ROOT = Path(__file__).parents[2]
FPE = ("fpe-2", "fpe-4", "fpe-8", "fpe-16")
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "frontier.json").read_text("utf-8"))


def page(name):
    return (ROOT / "docs" / name).read_text("utf-8")


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "scripts")
        import ablation
        import frontier

        yield frontier, ablation


@pytest.fixture(scope="module")
def docs(scripts):
    return scripts[0]


@pytest.fixture(scope="module")
def found(docs):
    return docs.Frontier(RESULTS)


@pytest.fixture(scope="module")
def earlier(docs):
    return docs.Earlier(RESULTS)


@pytest.fixture
def prose():
    """The page as one line, so that a sentence may break anywhere."""
    return " ".join(page("frontier.md").split())


def halves(found):
    return [
        [(one["set"], budget) for one in found.sets for budget in one["budgets"][part]]
        for part in (slice(None, 3), slice(3, None))
    ]


def large(found):
    """The points whose budget holds a linear classifier."""
    sizes = {one["set"]: one["outputs"] * (one["inputs"] + 1) for one in found.sets}
    return [point for point in found.points() if point[1] >= sizes[point[0]]]


# --- the file of results


def test_the_results_are_those_of_the_study():
    assert [f"frontier-{one['set']}" for one in RESULTS["sets"]] == [s.id for s in FRONTIERS]
    wanted = []
    for one, study in zip(RESULTS["sets"], FRONTIERS, strict=True):
        cells = study.scales["paper"].settings
        assert one["budgets"] == list(dict.fromkeys(cell.budget for cell in cells))
        assert {(one["data"], one["epochs"], one["batch"], one["inputs"], one["outputs"])} == {
            (c.task.data, c.epochs, c.batch, c.inputs, c.task.outputs) for c in cells
        }
        wanted += [(one["set"], cell.budget, cell.method) for cell in cells]
    assert [(c["set"], c["budget"], c["method"]) for c in RESULTS["cells"]] == wanted
    assert {method for _, _, method in wanted} == set(CONTENDERS)


def test_every_cell_has_ten_trials_within_the_budget():
    for cell in [*RESULTS["cells"], *RESULTS["earlier"]]:
        assert len(cell["accuracy"]) == 10
        assert all(0 < value < 100 for value in cell["accuracy"])
        assert 0 < cell["nonzeros"][0] <= cell["nonzeros"][1] <= cell["budget"]
        assert 0 <= cell["setting"] < SETTINGS
    assert RESULTS["about"]["trials"] == 10 * len(RESULTS["cells"])


def test_the_settings_are_the_methods_own():
    plans = {}
    for one, study in zip(RESULTS["sets"], FRONTIERS, strict=True):
        for cell in study.scales["paper"].settings:
            assert isinstance(cell, Contender)
            plans[one["set"], cell.budget, cell.method] = cell.plans
    for cell in RESULTS["cells"]:
        plan = plans[cell["set"], cell["budget"], cell["method"]][cell["setting"]]
        told = {name: value for name, value in cell["plan"].items() if name != "weights"}
        assert told == {name: getattr(plan, name) for name in told}


# --- what is made of it


def test_the_included_files_are_made_from_the_results(scripts):
    frontier, ablation = scripts
    made = frontier.files() | ablation.files()
    for name, text in made.items():
        assert text == page(f"parts/frontier-{name}.md"), f"{name}: run the scripts in docs"
        assert f"<!-- include: docs/parts/frontier-{name}.md -->" in page("frontier.md")
    assert {f"frontier-{name}.md" for name in made} == {
        path.name for path in (ROOT / "docs" / "parts").glob("frontier-*.md")
    }


def test_the_figure_is_drawn_from_the_results(docs, found):
    made = docs.picture(found)
    there = (ROOT / "docs" / "parts" / "frontier.svg").read_bytes()
    if f"Matplotlib v{matplotlib.__version__}".encode() in there:  # another may round otherwise
        assert made == there
    else:
        assert made.count(b"<path") == there.count(b"<path")


@pytest.mark.parametrize(("mean", "counts"), [(1.0, [0, 0, 30]), (99.0, [30, 0, 0])])
def test_verdicts_can_go_either_way(docs, mean, counts):
    results = json.loads(json.dumps(RESULTS))
    for cell in results["cells"]:
        if cell["method"] == "recipe":
            cell["accuracy"] = [mean + i / 100 for i in range(10)]
    found = docs.Frontier(results)
    assert found.totals() == counts
    assert ("At no point is any" in docs.totals(found)[0]) == (mean == 99.0)


# --- numbers in the prose


def test_the_readme_and_the_page_have_the_totals(found, prose):
    better, level, worse = found.totals()
    total = f"better at **{better}**, level at **{level}** and significantly worse at **{worse}**"
    assert better + level + worse == 30
    assert total in prose
    assert total in (ROOT / "README.md").read_text("utf-8")
    log = " ".join((ROOT / "CHANGELOG.md").read_text("utf-8").split())
    assert f"others at {better} of 30 points, level at {level}" in log
    assert better >= 15  # "It is reached"
    assert not any(found.beaten_by(point) for point in found.points())  # "behind at none"
    assert level == 7  # "seven"
    assert len(found.methods) == 15  # "fifteen"


def test_what_is_said_of_fpe(found, prose):
    small, more = halves(found)
    assert found.totals(small, "fpe-4", "dense") == [15, 0, 0]
    assert "better than dense at all 15 points" in prose
    better, _, worse = found.totals(more, "fpe-4", "dense")
    assert f"better at {better} and worse at {worse}, and on average nothing is won" in prose
    gains = [found.against(point, "fpe-4", "dense").difference for point in more]
    assert abs(sum(gains)) / 15 < 0.05
    for one in found.sets:
        alphas = {found.best((one["set"], budget), FPE) for budget in one["budgets"][:3]}
        if one["set"] in ("fashionmnist", "coarse"):
            assert alphas <= {"fpe-8", "fpe-16"}
        if one["set"] in ("clinc150", "banking77"):
            assert alphas <= {"fpe-2", "fpe-4"}
    bad = found.totals(more, "fpe-16", "dense")[2]
    assert f"budgets is worse than dense at {bad} of 15 points" in prose


def test_what_is_said_of_the_others(found, prose):
    small, more = halves(found)
    for method in ("set", "rigl", "gradual", "recipe"):
        assert found.totals(small, method, "FPE") == [15, 0, 0]
    assert f"in one shot is, at {found.totals(small, 'one-shot', 'FPE')[0]}." in prose
    counts = [found.totals(more, method, "FPE") for method in ("set", "rigl", "gradual")]
    told = "better than it at {}, {} and {} of 15 points and never worse"
    assert told.format(*(better for better, _, _ in counts)) in prose
    assert [worse for _, _, worse in counts] == [0, 0, 0]
    for method in ("static-uniform", "static-erk"):
        assert found.totals((), "FPE", method)[0] > 15
    early = found.totals(small, "fpe-at-0", "fpe-4")[0]
    assert f"at half at {early} of the 15 smaller points" in prose
    clinc = found.sets[3]
    assert all(found.mean((clinc["set"], b), "fpe-at-0") < 4 for b in clinc["budgets"][:2])
    unused = found.cells["banking77", 1001, "l1"]["nonzeros"][0]
    assert f"one network has {unused} non-zeros of 1,001" in prose


def test_what_is_said_of_linear_classifiers_and_large_budgets(found, prose):
    alone = [p for p in found.points() if not found.cells[*p, "recipe"]["plan"]["hidden"]]
    smallest = {(one["set"], one["budgets"][0]) for one in found.sets if one["features"]}
    assert smallest <= set(alone)
    assert len(smallest) == 4
    assert f"at {len(alone)} of all 30 points" in prose
    for one in found.sets[:2]:
        assert found.rival((one["set"], one["budgets"][0])) == "l1"
    last = [(one["set"], one["budgets"][-1]) for one in found.sets]
    behind = [
        max(found.mean(p, found.best(p)) - found.mean(p, method) for p in last)
        for method in ("dense", "FPE", "recipe")
    ]
    assert f"most {behind[0]:.1f} points behind" in prose
    assert f"the best FPE at most {behind[1]:.1f}." in prose
    assert f"The recipe is at most {behind[2]:.1f} behind" in prose
    ahead = [p for p in last if found.verdict(p) == "better"]
    assert len(ahead) == 3
    most = max(found.against(p, "recipe", found.rival(p)).difference for p in ahead)
    assert f"ahead on three data sets, by {most:.1f} points at most" in prose


def test_what_is_said_of_the_points_that_remain(found, earlier, prose):
    level = [point for point in found.points() if found.verdict(point) == "level"]
    tests = {point: found.against(point, "recipe", found.rival(point)) for point in level}
    below = sorted((p for p in level if tests[p].difference < 0), key=lambda p: tests[p].p)
    assert len(below) == 5
    assert below[:3] == [("banking77", 99869), ("coarse", 39995), ("coarse", 16010)]
    told = "largest budget (p = {:.3f}) and the superclasses' 39,995 (p = {:.3f}) and 16,010 (p = "
    first, second, third = (tests[point].p for point in below[:3])
    assert told.format(first, second) + f"{third:.3f})" in prose
    then, now = earlier.mean("dd69b8b", below[2]), found.mean(below[2], "recipe")
    assert f"did better, {then:.2f} instead of {now:.2f}" in prose
    old = earlier.against("dd69b8b", below[2])
    assert old.significant
    assert old.difference > 0
    assert earlier.others["dd69b8b"][below[2]]["method"] == "rigl"
    rivals = [found.cells[*point, found.rival(point)] for point in level]
    alike = [cell for cell in rivals if cell["method"] in ("gradual", "set", "rigl")]
    assert len(alike) == 6
    dense = {
        (one["set"], budget): width
        for one in found.sets
        for budget, width in zip(one["budgets"], one["widths"], strict=True)
    }
    times = [cell["plan"]["hidden"] / dense[cell["set"], cell["budget"]] for cell in alike]
    assert (round(min(times)), round(max(times))) == (2, 9)


def test_what_is_said_of_the_earlier_runs(docs, found, earlier, prose):
    assert list(earlier.ours) == ["acdc165", "dd69b8b"]
    assert {short for short, _ in earlier.ours["acdc165"]} == {"banking77"}
    assert list(earlier.ours["dd69b8b"]) == found.points()
    lost = [-earlier.against("acdc165", ("banking77", b)).difference for b in (39809, 99869)]
    assert f"it was {lost[0]:.2f} and {lost[1]:.2f} points below" in prose
    better, level, worse = earlier.totals("dd69b8b")
    assert f"better at {better} points, level at {level} and worse at {worse}" in prose
    assert docs.changed(found) == large(found)
    assert len(large(found)) == 10  # "the ten points"
    for point in found.points():  # the other settings were not changed
        then, now = earlier.ours["dd69b8b"][point], found.cells[*point, "recipe"]
        if point not in large(found) and then["setting"] == now["setting"]:
            assert then["plan"].items() <= now["plan"].items()
    won = [
        point
        for point in found.points()
        if point not in large(found)
        and found.verdict(point) == "better"
        and not earlier.against("dd69b8b", point).significant
    ]
    assert won == [("cifar100", 39945), ("clinc150", 6035)]  # "two of the points"
    other = earlier.others["dd69b8b"][won[0]]
    assert other["setting"] != found.cells[*won[0], other["method"]]["setting"]  # "its rival's"
    own = earlier.ours["dd69b8b"][won[1]]
    assert own["setting"] != found.cells[*won[1], "recipe"]["setting"]  # "the recipe's"


def test_what_is_said_of_the_strong_decay(found, prose):
    others = [
        cell
        for (short, budget, method), cell in found.cells.items()
        if method != "recipe" and (short, budget) in large(found)
    ]
    strong = sum(cell["plan"]["decay"] == 1 for cell in others)
    assert f"in {strong} of their {len(others)} cells with such budgets" in prose
    for cell in found.cells.values():
        if (cell["set"], cell["budget"]) not in large(found):
            assert cell["plan"]["decay"] != 1


@pytest.mark.parametrize("budget", [5_000, 60_000])
def test_the_recipe_is_told_as_it_is(prose, budget):
    plans, h = presets.recommended_plans(budget, 512, 100), presets.hidden_for(budget, 512, 100)
    for number, one in enumerate(plans, 1):
        assert one.hidden in (0, 4 * h if budget == 60_000 else h)
        hidden = f"{'4 ' if budget == 60_000 else ''}h neurons"
        what = f"linear and {hidden}" if one.direct else hidden
        dials = f"{one.lr:g} | {one.decay:g} | {one.dropout:g} | {one.smooth:g}"
        assert f"| {number} | {what if one.hidden else 'linear alone'} | {dials} |" in prose
        assert (one.prune.begin, one.prune.end, one.prune.power) == (0.1, 0.75, 5.0)
        assert one.prune.saliency == "second-order"
    assert presets.LEAST_HIDDEN == 128


def test_how_wide_the_recipe_is(prose):
    assert {p.hidden for p in presets.recommended_plans(300_000, 512, 100)} == {1024}  # h is 1,024
    assert {p.hidden for p in presets.recommended_plans(200_000, 512, 100)} == {1024}  # h is 512
    assert {p.hidden for p in presets.recommended_plans(600_000, 512, 100)} == {2048}  # h is 2,048
    assert "4 h neurons, but no more than 1,024, unless h itself is more" in prose
