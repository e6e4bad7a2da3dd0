"""What the documentation says of the frontier is what the committed results hold."""

import json
from pathlib import Path

import matplotlib
import pytest

from fissile.lab.contender import Contender
from fissile.lab.methods import CONTENDERS, SETTINGS
from fissile.lab.stats import compare
from fissile.lab.studies.frontier import FRONTIERS
from fissile.sparse import recipe

ROOT = Path(__file__).parents[2]
FPE = ("fpe-2", "fpe-4", "fpe-8", "fpe-16")
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "frontier.json").read_text("utf-8"))


def page(name):
    return (ROOT / "docs" / name).read_text("utf-8")


@pytest.fixture
def docs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import frontier

    return frontier


@pytest.fixture
def found(docs):
    return docs.Frontier(RESULTS)


@pytest.fixture
def prose():
    """The page as one line, so that a sentence may break anywhere."""
    return " ".join(page("frontier.md").split())


def halves(found):
    return [
        [(one["set"], budget) for one in found.sets for budget in one["budgets"][part]]
        for part in (slice(None, 3), slice(3, None))
    ]


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
    for cell in [*RESULTS["cells"], *RESULTS["first"]]:
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


def test_the_included_files_are_made_from_the_results(docs, found):
    for name, make in docs.FILES.items():
        assert make(found) == page(f"frontier-{name}.md"), f"{name}: run python docs/frontier.py"
    for name in docs.FILES:
        assert f"<!-- include: docs/frontier-{name}.md -->" in page("frontier.md")


def test_the_figure_is_drawn_from_the_results(docs, found):
    made = docs.picture(found)
    there = (ROOT / "docs" / "frontier.svg").read_bytes()
    if f"Matplotlib v{matplotlib.__version__}".encode() in there:  # another may round otherwise
        assert made == there
    else:
        assert made.count(b"<path") == there.count(b"<path")


def test_verdicts_can_go_either_way(docs):
    results = json.loads(json.dumps(RESULTS))
    for cell in results["cells"]:
        if cell["method"] == "recipe":
            cell["accuracy"] = [1.0 + i / 10 for i in range(10)]
    assert docs.Frontier(results).totals() == [0, 0, 30]
    for cell in results["cells"]:
        if cell["method"] == "recipe":
            cell["accuracy"] = [99.0 + i / 100 for i in range(10)]
    assert docs.Frontier(results).totals() == [30, 0, 0]


# --- numbers in the prose


def test_the_readme_and_the_page_have_the_totals(found):
    better, level, worse = found.totals()
    total = f"better at **{better}**, level at **{level}** and significantly worse at **{worse}**"
    assert better + level + worse == 30
    assert total in page("frontier.md")
    assert total in (ROOT / "README.md").read_text("utf-8")
    assert better > 15  # "better at more than half of them"
    assert worse == 4  # "all four"
    assert len(found.methods) == 15  # "fifteen"


def test_what_is_said_of_fpe(found, prose):
    small, large = halves(found)
    assert found.totals(small, "fpe-4", "dense") == [15, 0, 0]
    assert "better than dense at all 15 points" in prose
    better, _, worse = found.totals(large, "fpe-4", "dense")
    assert f"better at {better} and worse at {worse}, and on average nothing is won" in prose
    gains = [found.against(point, "fpe-4", "dense").difference for point in large]
    assert abs(sum(gains)) / 15 < 0.05
    for one in found.sets:
        alphas = {found.best((one["set"], budget), FPE) for budget in one["budgets"][:3]}
        if one["set"] in ("fashionmnist", "coarse"):
            assert alphas <= {"fpe-8", "fpe-16"}
        if one["set"] in ("clinc150", "banking77"):
            assert alphas <= {"fpe-2", "fpe-4"}
    bad = found.totals(large, "fpe-16", "dense")[2]
    assert f"budgets is worse than dense at {bad} of 15 points" in prose


def test_what_is_said_of_the_others(found, prose):
    small, large = halves(found)
    for method in ("set", "rigl", "gradual", "recipe"):
        assert found.totals(small, method, "FPE") == [15, 0, 0]
    assert f"in one shot is, at {found.totals(small, 'one-shot', 'FPE')[0]}." in prose
    for method in ("rigl", "gradual"):
        better, _, worse = found.totals(large, method, "FPE")
        assert (worse, f"better than it at {better} of 15 points each" in prose) == (0, True)
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
    assert "better" not in [found.verdict(point) for point in last]
    assert [found.best(p) for p in last] == ["rigl", "rigl", "gradual", "recipe", "rigl"]


def test_what_is_said_of_the_points_that_are_lost(found, prose):
    lost = [point for point in found.points() if found.verdict(point) == "worse"]
    budgets = {one["set"]: one["budgets"] for one in found.sets}
    assert all(budget in budgets[short][-2:] for short, budget in lost)
    for short, budget in lost:
        ours = found.cells[short, budget, "recipe"]
        share = budget / ours["plan"]["weights"]
        assert share < 0.15 if short == "fashionmnist" else 0.34 < share < 0.4
    fashion = [p for p in lost if p[0] == "fashionmnist"]
    assert len(fashion) == 2
    for point in fashion:
        plan = found.cells[*point, found.rival(point)]["plan"]
        assert (plan["lr"], plan["dropout"], plan["smooth"]) == (1e-3, 0, 0.1)
        assert not any(
            (one.lr, one.dropout, one.smooth) == (1e-3, 0, 0.1)
            for one in recipe.plans(point[1], 784, 10)
        )
    held = [found.cells["banking77", 99869, m]["held_out"] for m in ("rigl", "recipe")]
    tested = found.against(("banking77", 99869), "rigl", "recipe").difference
    assert f"{held[0] - held[1]:.2f} points apart on held-out samples and {tested:.2f} on" in prose


def test_what_is_said_of_the_first_run(found, prose):
    assert [cell["set"] for cell in found.first] == ["banking77"] * 6
    lost = []
    for cell in found.first[-2:]:
        point = cell["set"], cell["budget"]
        lost.append(compare(found.accuracy(point, found.rival(point)), cell["accuracy"]).difference)
        assert cell["budget"] >= 77 * 385  # the budget holds the linear classifier
    assert f"it was {lost[0]:.2f} and {lost[1]:.2f} points below" in prose
    second = found.first[1]
    change = compare(found.accuracy(("banking77", 2387), "recipe"), second["accuracy"]).difference
    assert second["budget"] == 2387
    assert f"the accuracy differs by {change:.2f} points" in prose


def test_the_recipe_is_told_as_it_is(prose):
    few, many = recipe.plans(5_000, 512, 100), recipe.plans(60_000, 512, 100)
    h, wide = recipe.hidden_for(5_000, 512, 100), recipe.hidden_for(60_000, 512, 100)
    assert (h, recipe.LEAST_HIDDEN) == (128, 128)
    for number, (one, other) in enumerate(zip(few, many, strict=True), 1):
        first = "with h neurons" if one.hidden == h else "linear alone"
        dials = f"{one.lr:g} | {one.dropout:g} | {one.smooth:g}"
        last = "the same"
        if (other.hidden, other.lr) != (one.hidden and wide, one.lr):
            times = "" if other.hidden == wide else f"{other.hidden // wide} "
            last = f"with {times}h neurons, rate {other.lr:g}, "
            last += f"dropout {other.dropout:g}, smoothing {other.smooth:g}"
        assert f"| {number} | {first} | {dials} | {last} |" in prose
    assert {plan.decay for plan in few + many} == {0.3}
    prune = few[0].prune
    assert {plan.prune for plan in few + many} == {prune}
    assert (prune.begin, prune.end, prune.power) == (0.1, 0.75, 5.0)
    assert prune.saliency == "second-order"
