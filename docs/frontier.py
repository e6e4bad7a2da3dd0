"""The tables and the figure of frontier.md, from benchmarks/results/frontier.json alone.

    python docs/frontier.py && python docs/include.py

Writes frontier-*.md and frontier.svg beside this file; the same results give the same bytes.
"""

import json
from pathlib import Path

from frontier_chart import picture
from frontier_results import FPE, OURS, Frontier

from fissile.lab.stats import compare, summary

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "frontier.json"
#: The methods whose distance from the best is shown; `FPE` stands for the best of the four.
SHOWN = ("dense", "FPE", "fpe-at-0", "set", "rigl", "gradual", "l1", OURS)


def rows(head, body):
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def text(lines):
    """Return lines as a file."""
    return "\n".join(lines) + "\n"


def signed(difference, digits=2):
    """Write a difference in points, zero without a minus."""
    return f"{round(difference, digits) + 0.0:+.{digits}f}"


def chance(p):
    """Write a p-value."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def tried(cell):
    """Say what a setting was, in a few words."""
    plan = cell["plan"]
    beside = cell["method"] == OURS
    wide = f"{plan['hidden']:,} neurons" if plan["hidden"] else "linear"
    wide += " beside a linear classifier" if beside and plan["hidden"] else ""
    parts = [wide, f"rate {plan['lr']:g}"]
    parts += [f"dropout {plan['dropout']:g}"] if plan["dropout"] else []
    parts += [f"smoothing {plan['smooth']:g}"] if plan["smooth"] else []
    return ", ".join(parts)


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
        f"**{worse}**. "
        + ("At no other point is any of them significantly better." if beaten == worse else some)
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


def worse(found):
    """Return the points where the recipe is significantly worse, with both settings."""
    lines = []
    for point in found.points():
        if found.verdict(point) != "worse":
            continue
        other = found.rival(point)
        test = found.against(point, OURS, other)
        ours, theirs = (found.cells[*point, method] for method in (OURS, other))
        more = ", ".join(one for one in found.beaten_by(point) if one != other)
        also = f"; significantly ahead too: {more}" if more else ""
        lines.append(
            f"- **{found.title(point[0])}, {point[1]:,} non-zeros**: {other} is ahead by "
            f"{-test.difference:.2f} points, {chance(test.p)}{also}. "
            f"Chosen on held-out samples: {other} with {tried(theirs)} ({theirs['held_out']:.2f} "
            f"held out); the recipe with {tried(ours)} ({ours['held_out']:.2f})."
        )
    return text(lines)


def first_run(found):
    """Return what the recipe came to before its settings for large budgets were changed."""
    body = []
    for cell in found.first:
        point = cell["set"], cell["budget"]
        other = found.rival(point)
        before = compare(cell["accuracy"], found.accuracy(point, other))
        shown = [f"{summary(cell['accuracy']).mean:.2f}", f"{found.mean(point, OURS):.2f}"]
        chosen = [str(one["setting"] + 1) for one in (cell, found.cells[*point, OURS])]
        difference = f"{signed(before.difference)} ({chance(before.p)})"
        now = signed(found.against(point, OURS, other).difference)
        body.append([f"{point[1]:,}", shown[0], chosen[0], difference, shown[1], chosen[1], now])
    head = [
        "non-zeros",
        "first run",
        "setting",
        "to the best other",
        "now",
        "setting",
        "difference",
    ]
    return text(rows(head, body))


def provenance(found):
    """Say when and where the trials ran, as their rows have it."""
    about = found.about
    commits = ", ".join(
        name[:7] + ("-dirty" if "dirty" in name else "") for name in about["commit"]
    )
    return text(
        [
            f"{about['trials']:,} trials and their searches, {about['seconds']} seconds in all on "
            f"one {', '.join(about['device'])}, {about['finished'][0][:10]}, torch "
            f"{', '.join(about['torch'])}; commit as recorded: {commits}. `{about['command']}`"
        ]
    )


FILES = {
    "table": table,
    "verdicts": verdicts,
    "settings": settings,
    "pairs": pairs,
    "worse": worse,
    "first": first_run,
    "summary": lambda found: text(totals(found)),
    "provenance": provenance,
}


def main():
    """Write all files."""
    found = Frontier(json.loads(RESULTS.read_text("utf-8")))
    for name, make in FILES.items():
        (HERE / f"frontier-{name}.md").write_text(make(found), "utf-8")
    (HERE / "frontier.svg").write_bytes(picture(found))


if __name__ == "__main__":
    main()
