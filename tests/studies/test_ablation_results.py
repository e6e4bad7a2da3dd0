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
SMALL, MIDDLE, LARGE = range(3)


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


@pytest.fixture
def prose():
    return " ".join((ROOT / "docs" / "frontier.md").read_text("utf-8").split())


def change(found, arm, *point):
    return found.change(point, arm).difference


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


def test_what_the_recipe_needs(found, prose):
    def said(text, *numbers):
        assert text.format(*numbers) in prose

    bad = {arm: found.counts(arm)[2] for arm in found.arms}
    said("by magnitude it is worse at {} points, and by {:.2f} at CIFAR-100's smallest",
         bad["recipe-magnitude"], -change(found, "recipe-magnitude", "cifar100", 713))  # fmt: skip
    said("which weights go: {:.2f} on average", -found.gain("recipe-magnitude", LARGE))
    said("worse at {}, and by {:.2f} at CLINC150's smallest budget",
         bad["recipe-one-shot"], -change(found, "recipe-one-shot", "clinc150", 1220))  # fmt: skip
    said("without them it is worse at {}, by {:.2f} on average",
         bad["recipe-no-direct"], -found.gain("recipe-no-direct", SMALL))  # fmt: skip
    pixels = [point for point in found.points() if point[0] == "fashionmnist"]
    assert found.counts("recipe-no-direct", pixels) == [0, 3, 0]
    said("without the three it is worse at {}, by {:.2f} on average with about 40,000",
         bad["recipe-plain"], -found.gain("recipe-plain", LARGE))  # fmt: skip
    said("the ablation has {:.2f} points for the one and {:.2f} for the other",
         -found.gain("recipe-magnitude", LARGE), -found.gain("recipe-plain", LARGE))  # fmt: skip


def test_what_a_linear_classifier_lacks(found, prose):
    lost = {point: -change(found, "recipe-linear", *point) for point in found.points()}
    smallest = [point for point in found.places(SMALL) if point[0] != "fashionmnist"]
    assert found.counts("recipe-linear", smallest)[2] == 0
    coarse, pixels = lost["coarse", 6416], [v for p, v in lost.items() if p[0] == "fashionmnist"]
    assert f"loses {coarse:.2f} and {lost['coarse', 39995]:.2f} points at the larger two" in prose
    assert f"{min(pixels):.2f} to {max(pixels):.2f} on FashionMNIST" in prose
    rest = [v for p, v in lost.items() if p[0] not in ("coarse", "fashionmnist")]
    assert f"and at most {max(rest):.2f} elsewhere" in prose
    assert f"6,230 it is even better, by {-lost['cifar100', 6230]:.2f}" in prose
    assert found.cells["cifar100", 6230, OURS]["plan"]["hidden"] == 0
    alone = [plan for plan in presets.recommended_plans(6230, 512, 100) if not plan.hidden]
    assert len(alone) == 2
    assert len(set(METHODS["recipe-linear"](6230, 512, 100))) > 2


def test_what_the_recipe_does_not_need(found, prose):
    assert found.counts("recipe-rewired")[::2] == [0, 3]
    assert found.counts("recipe-slower")[::2] == [0, 3]
    assert found.counts("recipe-split")[::2] == [1, 5]
    assert "slower pruning are worse at 3 points each and better at none" in prose
    assert "split them on the way is worse at 5 and better at 1" in prose
    for point in found.points():
        test = found.change(point, "recipe-rewired")
        if test.significant:
            arms = [found.cells[*point, arm]["setting"] for arm in ("recipe-rewired", OURS)]
            assert arms[0] != arms[1]


def test_what_helps_fpe(found, prose):
    helps = {"fpe-4-rewired": 9, "fpe-4-early": 8, "fpe-4-again": 5, "fpe-4-scaled": 4}
    assert {arm: found.counts(arm)[0] for arm in helps} == helps
    assert {found.counts(arm)[2] for arm in helps} == {0}
    for text in (
        f"better at 9 points and worse at none, by {found.gain('fpe-4-rewired', SMALL):.2f} on",
        "after a fifth of the epochs: better at 8, worse at none",
        "after the split*: better at 5, worse at none",
        "second layer's weights: better at 4, worse at none",
    ):
        assert text in prose
    gains = {arm: found.gain(arm, SMALL) for arm in found.arms}
    assert max(gains, key=gains.get) == "fpe-4-rewired"  # "worth the most"
    below = [found.against(point, OURS, "fpe-4-rewired") for point in found.points()]
    assert all(test.difference > 0 for test in below)
    count = sum(test.significant for test in below)
    assert f"below the recipe at every point, significantly at {count}" in prose


def test_what_does_not_help_fpe(found, prose):
    bad = {arm: found.counts(arm)[2] for arm in found.arms}
    more = change(found, "fpe-4-saliency", "banking77", 1001)
    fewer = -change(found, "fpe-4-saliency", "clinc150", 1220)
    assert f"from {more:.2f} points more at Banking77's smallest budget to {fewer:.2f}" in prose
    assert found.counts("fpe-4-saliency")[::2] == [4, 3]  # "mixed"
    assert f"With alpha 16 it is worse at {bad['fpe-16-saliency']} points" in prose
    for one in found.sets[-2:]:
        for budget in one["budgets"][:2]:
            assert found.mean((one["set"], budget), "fpe-16-saliency") < 110 / one["outputs"]
    shares = ("fpe-4-layer", "fpe-4-erdos-renyi")
    assert "worse at {} and {} points and better at none".format(*(bad[a] for a in shares)) in prose
    lost = [f"{-found.gain(arm, SMALL):.2f}" for arm in shares]
    assert f"by {lost[0]} and {lost[1]} on average" in prose
    scores = ("fpe-4-normalized", "fpe-4-lamp")
    assert {found.counts(arm)[0] for arm in (*shares, *scores)} == {0}
    assert "at no point and worse at {} and {}".format(*(bad[a] for a in scores)) in prose
    dealt = {"fpe-4-gram": (3, 2), "fpe-4-activation": (3, 4), "fpe-4-gradient": (1, 2)}
    assert {arm: tuple(found.counts(arm)[::2]) for arm in dealt} == dealt
    assert "Gram matrix better at 3 points and worse at 2, by common activity 3 and 4" in prose
    assert found.counts("fpe-2-then-2")[::2] == [2, 2]


def test_how_far_a_choice_goes(found, prose):
    ours, direct = plans_of(OURS), plans_of("recipe-direct")
    same = [point for point in ours if ours[point] == direct[point]]
    assert f"At {len(same)} of the 15 points all six settings" in prose
    one, other = ("fashionmnist", 805), ("fashionmnist", 6370)
    assert {one, other} <= set(same)
    tests = [found.change(point, "recipe-direct") for point in (one, other)]
    assert all(test.significant for test in tests)
    assert "it is nevertheless {:.2f} and {:.2f} points lower".format(
        *(-test.difference for test in tests)
    ) in prose  # fmt: skip
    for point in (one, other):
        assert [found.cells[*point, arm]["setting"] for arm in ("recipe-direct", OURS)] == [0, 5]
    then, now = (found.cells[*other, arm]["held_out"] for arm in (OURS, "recipe-direct"))
    assert f"had {then:.2f} on the held-out samples then, and now no setting more than" in prose
    assert f"more than {now:.2f}." in prose
    pair = [found.cells["coarse", 6416, arm] for arm in (OURS, "recipe-direct")]
    assert pair[0]["setting"] == pair[1]["setting"]
    assert pair[0]["accuracy"] == pair[1]["accuracy"]
    assert "had {:.2f} and {:.2f} on held-out".format(*(c["held_out"] for c in pair)) in prose
    for point in set(ours) - set(same):
        assert found.cells[*point, OURS]["plan"]["direct"]


def test_what_is_said_of_networks_that_die(docs, found, prose):
    point = docs.FRAIL
    lost = [arm for arm in found.arms if found.collapsed(arm)]
    assert len(lost) == 5  # "five arms"
    assert {found.collapsed(arm) for arm in lost} == {3}
    assert len({found.cells[*point, arm]["setting"] for arm in lost}) == 1  # "a setting"
    assert found.collapsed("fpe-4") == 0
    for arm in ("fpe-4-rewired", "fpe-4-early", "fpe-4-again"):
        assert round(-found.change(point, arm).difference) == 40
    assert "The first three lose 40 points at FashionMNIST's 805" in prose


def test_a_hidden_layer_alone_is_chosen_at_the_largest_budgets(docs):
    frontier = docs.Frontier(docs.read("frontier"))
    for one in frontier.sets:
        assert not frontier.cells[one["set"], one["budgets"][-1], OURS]["plan"]["direct"]


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


def test_what_is_said_of_the_search(docs, search, prose):
    assert f"trained {len(search.plans)} plans at seven points" in prose
    assert (len(search.points), sorted(set(search.seeds))) == (7, [2, 4])
    for point in search.points:
        places = [search.place(near, point) for _, near in search.chosen(point)]
        assert len(places) == 6
        assert min(places) <= 5  # "among the best five"
    assert "At every point one of the six is among the best five" in prose
    assert len({id(search.best(point)[0]) for point in search.points}) > 1
    frontier = docs.Frontier(docs.read("frontier"))
    unseen = [("clinc150", 100195), ("fashionmnist", 15910), ("coarse", 16010)]
    assert [frontier.verdict(point) for point in unseen] == ["better", "better", "level"]
    assert not set(unseen) & set(search.points)


def test_the_recipes_settings_are_found_among_the_searched(search):
    for point in search.points:
        for plan, near in search.chosen(point):
            told = near["plan"]
            assert (told["direct"], told["lr"], told["decay"]) == (plan.direct, plan.lr, plan.decay)
            assert 0.5 <= told["hidden"] / plan.hidden <= 2
