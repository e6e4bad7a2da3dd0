"""What the documentation says of the ablation and of the search is what the results hold."""

import json
from pathlib import Path

import pytest

from fissile.bank.sparse import plan as presets
from fissile.lab.budget_methods import ABLATED, METHODS, OURS
from fissile.lab.studies.frontier import ABLATIONS

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "ablation.json").read_text("utf-8"))
SEARCH = json.loads((ROOT / "benchmarks" / "results" / "recipe-search.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def docs():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "scripts")
        import ablation

        yield ablation


@pytest.fixture(scope="module")
def found(docs):
    return docs.Ablation(RESULTS)


@pytest.fixture(scope="module")
def search(docs):
    return docs.Search(SEARCH, RESULTS["sets"])


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import recipe_search

    return recipe_search


def plans_of(method):
    """The plans of a method at every point of the study."""
    return {
        (study.id.removeprefix("ablation-"), cell.budget): METHODS[method](
            cell.budget, cell.inputs, cell.task.outputs
        )
        for study in ABLATIONS
        for cell in study.scales["paper"].settings
    }


# --- the file of results


def test_every_arm_is_there_with_five_trials(docs, found):
    assert set(found.methods) == {OURS, "fpe-4", "fpe-16", *docs.ARMS}
    assert set(ABLATED) <= set(found.methods)  # none was added since without being run
    assert len(found.points()) == 15
    assert len(RESULTS["cells"]) == 15 * len(found.methods)
    for cell in RESULTS["cells"]:
        assert len(cell["accuracy"]) == 5
        assert 0 < cell["nonzeros"][0] <= cell["nonzeros"][1] <= cell["budget"]


def test_the_settings_are_those_of_arms_that_are_left(found):
    for method in set(found.methods) & set(METHODS):
        for point, plans in plans_of(method).items():
            cell = found.cells[*point, method]
            told = {name: value for name, value in cell["plan"].items() if name != "weights"}
            plan = plans[cell["setting"]]
            assert told == {name: getattr(plan, name) for name in told}, (method, point)


def test_the_base_is_the_frontiers(docs, found):
    cells = docs.Frontier(docs.read("frontier")).cells
    for point in found.points():
        for method in (OURS, "fpe-4", "fpe-16"):
            whole, part = cells[*point, method], found.cells[*point, method]
            assert part == whole | {k: part[k] for k in ("accuracy", "nonzeros")}
            assert part["accuracy"] == whole["accuracy"][:5]


def test_arms_that_are_gone_are_marked_with_their_commit(docs, monkeypatch, found):
    table = docs.summary_table
    gone = docs.METHODS.copy()
    del gone["recipe-slower"]
    monkeypatch.setattr(docs, "METHODS", gone)
    assert "| recipe-slower † |" in table(found)
    assert "† Removed from the code since; commit 6362c0e has it." in table(found)
    monkeypatch.setattr(docs, "METHODS", docs.ARMS)
    assert "†" not in table(found)


# --- numbers in the prose


# --- the search


def test_the_script_has_the_plans_that_were_searched(script):
    kept = [json.dumps(line["plan"]) for line in SEARCH["plans"]]
    plans = [json.dumps(script.told(plan)) for plan in script.grid(40_000)]
    assert plans == kept[: len(plans)]
    assert (len(plans), len(kept), len(set(kept))) == (136, 140, 140)
    assert all(line["plan"]["splits"] for line in SEARCH["plans"][len(plans) :])


def test_the_script_searches_the_points_that_were_searched(script):
    cells = script.cells(script.POINTS)
    points = [(point["set"], point["budget"]) for point in SEARCH["points"]]
    assert [(short, cell.budget) for short, cell in cells] == points
    for (short, cell), point in zip(cells, SEARCH["points"], strict=True):
        assert len(point["seeds"]) == script.SEEDS.get(short, 2)
        assert presets.is_large(cell.budget, cell.inputs, cell.task.outputs)
    for line in SEARCH["plans"]:
        assert [len(seeds) for seeds in line["held_out"]] == [
            len(p["seeds"]) for p in SEARCH["points"]
        ]
        assert all(n <= budget for n, (_, budget) in zip(line["nonzeros"], points, strict=True))


def test_the_recipes_settings_are_found_among_the_searched(search):
    for point in search.points:
        for plan, near in search.chosen(point):
            told = near["plan"]
            assert (told["direct"], told["lr"], told["decay"]) == (plan.direct, plan.lr, plan.decay)
            assert 0.5 <= told["hidden"] / plan.hidden <= 2
