"""The tables and the figure of frontier.md, from three files of benchmarks/results alone.

    python docs/frontier.py && python docs/include.py

Writes frontier-*.md and frontier.svg beside this file; the same results give the same bytes.
"""

import json
from pathlib import Path

import frontier_ablation
import frontier_earlier
import frontier_search
from frontier_chart import picture
from frontier_results import FPE, OURS, Earlier, Frontier
from frontier_text import chance, rows, signed, text, tried

from fissile.lab.stats import summary

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
#: The methods whose distance from the best is shown; `FPE` stands for the best of the four.
SHOWN = ("dense", "FPE", "fpe-at-0", "set", "rigl", "gradual", "l1", OURS)


# --- the files


def table(found):
    """Return a table for every data set: methods down, budgets across."""
    lines = []
    for one in found.sets:
        lines += [f"### {one['title']}", "", _seen(one), ""]
        body = []
        for method in found.methods:
            cells = [_cell(found, (one["set"], budget), method) for budget in one["budgets"]]
            body.append([f"**{method}**" if method == OURS else method, *cells])
        lines += [*rows(["method", *(f"{budget:,}" for budget in one["budgets"])], body), ""]
    return text(lines[:-1])


def _seen(one):
    features = f"features of {one['features']}" if one["features"] else "pixels"
    return (
        f"{one['inputs']} inputs ({features}), {one['outputs']} classes, {one['train']:,} samples "
        f"to train on, {one['test']:,} to test; {one['epochs']} epochs, batches of {one['batch']}."
    )


def _cell(found, point, method):
    own = summary(found.accuracy(point, method))
    shown = f"{own.mean:.2f} ± {own.error:.2f}"
    best = found.best(point)
    if method == best:
        return f"**{shown}**"
    return f"*{shown}*" if found.verdict(point, method, best) == "level" else shown


def totals(found):
    """Return the outcome in two sentences."""
    better, level, worse = found.totals()
    points = len(found.points())
    beaten = sum(bool(found.beaten_by(point)) for point in found.points())
    some = f"Some method is significantly better than it at {beaten}."
    return [
        f"Against the best of the other {len(found.methods) - 1} methods at each of {points} "
        f"points ({len(found.sets)} data sets, {points // len(found.sets)} budgets), the recipe is "
        f"significantly better at **{better}**, level at **{level}** and significantly worse at "
        f"**{worse}**. {some if beaten else 'At no point is any of them significantly better.'}"
    ]


def verdicts(found):
    """Return the recipe against the best other method, at every point."""
    body = []
    for one in found.sets:
        for budget in one["budgets"]:
            point = one["set"], budget
            other = found.rival(point)
            test, word = found.against(point, OURS, other), found.verdict(point)
            name = one["title"] if budget == one["budgets"][0] else ""
            means = [f"{found.mean(point, method):.2f}" for method in (other, OURS)]
            difference = [signed(test.difference), chance(test.p).removeprefix("p ").lstrip("= ")]
            word = f"**{word}**" if word == "worse" else word
            body.append([name, f"{budget:,}", other, *means, *difference, word])
    head = ["data set", "non-zeros", "best other", "its accuracy", "recipe", "difference", "p"]
    return text([*totals(found), "", *rows([*head, "recipe is"], body)])


def settings(found):
    """Return which of the six settings the recipe chose."""
    lines = []
    for one in found.sets:
        body = []
        for budget in one["budgets"]:
            cell = found.cells[one["set"], budget, OURS]
            kept = f"{100 * budget / cell['plan']['weights']:.0f} %"
            held = f"{cell['held_out']:.2f}"
            body.append([f"{budget:,}", str(cell["setting"] + 1), tried(cell), kept, held])
        head = [
            "non-zeros",
            "setting",
            "what it is",
            "budget over first weights",
            "held-out accuracy",
        ]
        lines += [f"{one['title']}:", "", *rows(head, body), ""]
    return text(lines[:-1])


def pairs(found):
    """Return how often methods beat dense and FPE, and how far from the best they are."""
    halves = [
        [point for one in found.sets for point in [(one["set"], b) for b in one["budgets"][part]]]
        for part in (slice(None, 3), slice(3, None))
    ]
    body = []
    for method in found.methods:
        cells = []
        for other in ("dense", "FPE"):
            skipped = method == other or (other == "FPE" and method in FPE)
            cells += ["" if skipped else _duel(found, half, method, other) for half in halves]
        body.append([method, *cells])
    head = ["method", "dense, three smaller budgets", "three larger", "FPE, smaller", "larger"]
    lines = [*rows(head, body), ""]
    body = []
    for place in range(len(found.sets[0]["budgets"])):
        points = [(one["set"], one["budgets"][place]) for one in found.sets]
        about = f"{min(b for _, b in points):,} to {max(b for _, b in points):,}"
        body.append([about, *(_behind(found, points, method) for method in SHOWN)])
    names = ("best FPE" if method == "FPE" else method for method in SHOWN)
    early = [_duel(found, half, "fpe-at-0", "fpe-4") for half in halves]
    lines += [
        f"Split at the start against split at half, alpha 4: {early[0]}; larger budgets: "
        f"{early[1]}.",
        f"Best of the four alphas: {_alphas(found, halves[0])}; larger budgets: "
        f"{_alphas(found, halves[1])}.",
        "",
    ]
    return text([*lines, *rows(["non-zeros", *names], body)])


def _duel(found, points, method, other):
    counts = "/".join(map(str, found.totals(points, method, other)))
    gains = [found.against(point, method, other).difference for point in points]
    return f"{counts}, {signed(sum(gains) / len(gains), 1)}"


def _alphas(found, points):
    chosen = [found.best(point, FPE) for point in points]
    return ", ".join(f"{one} at {chosen.count(one)}" for one in FPE)


def _behind(found, points, method):
    gaps = [found.mean(p, found.best(p)) - found.mean(p, method) for p in points]
    low, high = f"{min(gaps):.1f}", f"{max(gaps):.1f}"
    return low if low == high else f"{low} to {high}"


def remaining(found):
    """Return the points where the recipe is not significantly better, with both settings."""
    lines = []
    for point in found.points():
        if found.verdict(point) == "better":
            continue
        other = found.rival(point)
        test = found.against(point, OURS, other)
        ours, theirs = (found.cells[*point, method] for method in (OURS, other))
        lines.append(
            f"- **{found.title(point[0])}, {point[1]:,} non-zeros**: {signed(test.difference)} "
            f"points to {other}, {chance(test.p)}. Chosen on held-out samples: {other} with "
            f"{tried(theirs)} ({theirs['held_out']:.2f} held out); the recipe with {tried(ours)} "
            f"({ours['held_out']:.2f})."
        )
    return text(lines)


def provenance(found):
    """Say when and where the trials ran, as their rows have it."""
    about = found.about
    commits = ", ".join(name[:7] + name[40:] for name in about["commit"])
    return text(
        [
            f"{about['trials']:,} trials and their searches, {about['seconds']} seconds in all on "
            f"one {', '.join(about['device'])}, {about['finished'][0][:10]}, torch "
            f"{', '.join(about['torch'])}, commit {commits}. `{about['command']}`"
        ]
    )


FRONTIER = {
    "table": table,
    "verdicts": verdicts,
    "settings": settings,
    "pairs": pairs,
    "remaining": remaining,
    "summary": lambda found: text(totals(found)),
    "provenance": provenance,
}
ABLATION = {
    "ablation": frontier_ablation.summary_table,
    "ablation-table": frontier_ablation.full_table,
    "ablation-provenance": frontier_ablation.provenance,
}
SEARCH = {"search-best": frontier_search.best, "search-chosen": frontier_search.chosen}


def read(name):
    """Return a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def files():
    """Return every file that the page includes, by its name."""
    results = read("frontier")
    found = Frontier(results)
    search = frontier_search.Search(read("recipe-search"), found.sets)
    ablation = frontier_ablation.Ablation(read("ablation"))
    made = {name: make(found) for name, make in FRONTIER.items()}
    made |= {name: make(ablation) for name, make in ABLATION.items()}
    made |= {name: make(search) for name, make in SEARCH.items()}
    return made | {"earlier": frontier_earlier.table(found, Earlier(results))}


def main():
    """Write all files."""
    for name, made in files().items():
        (HERE / f"frontier-{name}.md").write_text(made, "utf-8")
    (HERE / "frontier.svg").write_bytes(picture(Frontier(read("frontier"))))


if __name__ == "__main__":
    main()
