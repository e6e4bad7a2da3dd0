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
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "frontier.json").read_text("utf-8"))


def page(name):
    return (ROOT / "docs" / name).read_text("utf-8")


def told():
    """Return all pages on the frontier, one after the other."""
    return "".join(map(page, sorted(path.name for path in (ROOT / "docs").glob("frontier*.md"))))


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


@pytest.fixture
def prose():
    """The pages as one line, so that a sentence may break anywhere."""
    return " ".join(told().split())


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
        assert f"<!-- include: docs/parts/frontier-{name}.md -->" in told()
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
