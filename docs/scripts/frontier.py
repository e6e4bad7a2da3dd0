"""The tables and the figure of frontier.md, from benchmarks/results/frontier.json.

    python docs/scripts/frontier.py && python docs/scripts/include.py

Writes frontier-*.md and frontier.svg into docs/parts; the same results give the same bytes.
"""

import json
from io import BytesIO
from pathlib import Path

from fissile.bank.sparse.plan import is_large
from fissile.lab.budget_methods import OURS
from fissile.lab.plots.style import FULL, Look, styled
from fissile.lab.stats import compare, summary

ROOT = Path(__file__).parents[2]
PARTS, RESULTS = ROOT / "docs" / "parts", ROOT / "benchmarks" / "results"
FPE = ("fpe-2", "fpe-4", "fpe-8", "fpe-16")
#: What a method may be against another; without a p-value below 0.05 they are level.
WORDS = ("better", "level", "worse")
#: The methods whose distance from the best is shown; `FPE` stands for the best of the four.
SHOWN = ("dense", "FPE", "fpe-at-0", "set", "rigl", "gradual", "l1", OURS)
GREY = "#B8B8B8"
#: Lines that are looked for, the boldest last; all other methods are thin and grey.
LOOKS = {
    "dense": Look("dense", "#000000", "D", (0, (4, 2)), size=2.8),
    "fpe-4": Look("FPE, α = 4", "#D55E00", "s", "-", size=3.2),
    "l1": Look("L1, linear", "#CC79A7", "v", (0, (1, 1.4)), filled=False),
    "rigl": Look("RigL", "#009E73", "^", "-.", filled=False),
    "gradual": Look("gradual pruning", "#E69F00", "P", (0, (4, 1.5))),
    "recipe": Look("the recipe", "#0072B2", "o", "-", size=3.8),
}


# --- the results


def word(comparison):
    """Say what a comparison came to."""
    if not comparison.significant:
        return "level"
    return "better" if comparison.difference > 0 else "worse"


class Frontier:
    """Accuracies of every data set, budget and method, and how they compare."""

    def __init__(self, results):
        self.about, self.sets = results["about"], results["sets"]
        self.cells = {(c["set"], c["budget"], c["method"]): c for c in results["cells"]}
        self.methods = list(dict.fromkeys(method for _, _, method in self.cells))
        self.means = {key: summary(c["accuracy"]).mean for key, c in self.cells.items()}
        self.compared = {}  # tests that several tables need are done once

    def points(self):
        """List data sets and budgets, in their order."""
        return [(one["set"], budget) for one in self.sets for budget in one["budgets"]]

    def accuracy(self, point, method):
        """Return the accuracies of all trials; of `FPE`, those of the best of the four."""
        chosen = self.best(point, FPE) if method == "FPE" else method
        return self.cells[*point, chosen]["accuracy"]

    def mean(self, point, method):
        """Return the mean accuracy, of `FPE` that of the best of the four."""
        return self.means[*point, self.best(point, FPE) if method == "FPE" else method]

    def best(self, point, methods=()):
        """Return the method with the highest mean, the first of several."""
        return max(methods or self.methods, key=lambda one: self.mean(point, one))

    def rival(self, point):
        """Return the best of all methods but the recipe."""
        return self.best(point, [one for one in self.methods if one != OURS])

    def against(self, point, method, other):
        """Compare two methods trial by trial."""
        key = point, method, other
        if key not in self.compared:
            self.compared[key] = compare(self.accuracy(point, method), self.accuracy(point, other))
        return self.compared[key]

    def verdict(self, point, method=OURS, other=""):
        """Say whether a method is better, level or worse; than the best other, if none is named."""
        return word(self.against(point, method, other or self.rival(point)))

    def totals(self, points=(), method=OURS, other=""):
        """Count the verdicts, in the order of WORDS."""
        found = [self.verdict(point, method, other) for point in points or self.points()]
        return [found.count(one) for one in WORDS]

    def beaten_by(self, point):
        """List the methods that are significantly better than the recipe."""
        return [one for one in self.methods if self.verdict(point, one, OURS) == "better"]

    def title(self, short):
        """Return what a data set is called."""
        return next(one["title"] for one in self.sets if one["set"] == short)


class Earlier:
    """The recipe and the best other method of runs before this one, by commit and point."""

    def __init__(self, results):
        self.ours, self.others = {}, {}
        for cell in results["earlier"]:
            kept = self.ours if cell["method"] == OURS else self.others
            kept.setdefault(cell["commit"], {})[cell["set"], cell["budget"]] = cell
        # Of the first run the recipe alone is left; the second kept its other methods' results.
        first, second = self.ours
        self.others[first] = {point: self.others[second][point] for point in self.ours[first]}

    def mean(self, commit, point):
        """Return the recipe's mean accuracy."""
        return summary(self.ours[commit][point]["accuracy"]).mean

    def against(self, commit, point):
        """Compare the recipe with the best other method of that time."""
        pair = (kept[commit][point]["accuracy"] for kept in (self.ours, self.others))
        return compare(*pair)

    def totals(self, commit):
        """Count the verdicts, in the order of WORDS."""
        found = [word(self.against(commit, point)) for point in self.ours[commit]]
        return [found.count(one) for one in WORDS]


# --- how numbers and settings are written


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
    beside = cell["method"] == OURS and cell["plan"]["direct"]
    return setting(cell["plan"], "neurons beside a linear classifier" if beside else "neurons")


def setting(plan, neurons="neurons"):
    """Say what a plan is; the usual decay goes without saying."""
    parts = [f"{plan['hidden']:,} {neurons}" if plan["hidden"] else "linear"]
    parts += [f"rate {plan['lr']:g}"]
    parts += [f"decay {plan['decay']:g}"] if plan["decay"] not in (0, 0.3) else []
    parts += [f"dropout {plan['dropout']:g}"] if plan["dropout"] else []
    parts += [f"smoothing {plan['smooth']:g}"] if plan["smooth"] else []
    return ", ".join(parts)


# --- the tables


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


# --- earlier runs


def changed(found):
    """List the points whose budget holds a linear classifier: there the recipe has other plans."""
    return [
        (one["set"], budget)
        for one in found.sets
        for budget in one["budgets"]
        if is_large(budget, one["inputs"], one["outputs"])
    ]


def earlier_table(found, earlier):
    """Return the runs side by side where plans were changed, and how they differ elsewhere."""
    body = []
    for point in changed(found):
        cells = [_then(earlier, commit, point) for commit in earlier.ours]
        rival = found.rival(point)
        own = found.mean(point, OURS), found.cells[*point, OURS]["setting"]
        cells.append(_shown(*own, rival, found.against(point, OURS, rival)))
        body.append([found.title(point[0]), f"{point[1]:,}", *cells])
    head = ["data set", "non-zeros", *earlier.ours, "now"]
    counts = [(name, earlier.totals(name)) for name in earlier.ours] + [("now", found.totals())]
    told = "; ".join(f"{name} {'/'.join(map(str, numbers))}" for name, numbers in counts)
    lines = [*rows(head, body), "", f"{'/'.join(WORDS).capitalize()}: {told}.", ""]
    return text([*lines, _elsewhere(found, earlier)])


def _then(earlier, commit, point):
    if point not in earlier.ours[commit]:
        return ""
    other = earlier.others[commit][point]["method"]
    own = earlier.mean(commit, point), earlier.ours[commit][point]["setting"]
    return _shown(*own, other, earlier.against(commit, point))


def _shown(mean, setting, other, test):
    return f"{mean:.2f} ({setting + 1}), {signed(test.difference)} to {other}, {chance(test.p)}"


def unchanged(found, earlier):
    """Return, by point, the recipe's accuracy now less then where its plans are the same."""
    *_, last = earlier.ours
    there = [point for point in found.points() if point not in changed(found)]
    return {point: found.mean(point, OURS) - earlier.mean(last, point) for point in there}


def _elsewhere(found, earlier):
    *_, last = earlier.ours
    apart = unchanged(found, earlier)
    most = max(apart, key=lambda point: abs(apart[point]))
    other = [
        f"{found.title(short)} {budget:,} ({before}, now {found.verdict((short, budget))})"
        for short, budget in apart
        if (before := word(earlier.against(last, (short, budget))))
        != found.verdict((short, budget))
    ]
    middle = sum(map(abs, apart.values())) / len(apart)
    return (
        f"At the other {len(apart)} points every plan of every method is as it was at {last}. The "
        f"recipe's means of the two runs are {middle:.2f} points apart on average, at most "
        f"{abs(apart[most]):.2f} ({found.title(most[0])}, {most[1]:,}); the verdict is another at "
        f"{' and '.join(other)}."
    )


# --- the figure


def picture(found):
    """Return the figure as SVG."""
    page = BytesIO()
    with styled():
        draw(found).savefig(page, format="svg", metadata={"Date": None})
    return page.getvalue()


def draw(found):
    """Return the figure; the legend has the sixth place."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(FULL, 4.4), layout="constrained")
    grid = figure.subplots(2, 3)
    for axes, one in zip(grid.flat, found.sets, strict=False):
        panel(axes, found, one)
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy (%)")
    handles = [Line2D([], [], label=LOOKS[name].label, **line(name)) for name in reversed(LOOKS)]
    rest = len(set(found.methods) - set(LOOKS))
    handles.append(Line2D([], [], label=f"{rest} others", **line("")))
    grid[1, 2].axis("off")
    grid[1, 2].legend(handles=handles, loc="center", frameon=False)
    return figure


def line(method):
    """Return how loud a method is."""
    if method not in LOOKS:
        return {"color": GREY, "linewidth": 0.6, "zorder": 1}
    loud = method == "recipe"
    return LOOKS[method].curve | {"linewidth": 1.7 if loud else 1.0, "zorder": 3 if loud else 2}


def panel(axes, found, one):
    """Draw one data set; lines that are far below the recipe come from outside."""
    means = {
        method: [found.mean((one["set"], budget), method) for budget in one["budgets"]]
        for method in found.methods
    }
    for method, mean in means.items():
        axes.plot(one["budgets"], mean, **line(method))
    least, most = min(means["recipe"]), max(map(max, means.values()))
    axes.set_ylim(least - 0.7 * (most - least), most + 0.06 * (most - least))
    axes.set_xscale("log")
    axes.set_title(one["title"].replace(", frozen features", " features"))
    axes.set_xlabel("non-zero parameters")


# --- the files


FILES = {
    "table": table,
    "verdicts": verdicts,
    "settings": settings,
    "pairs": pairs,
    "remaining": remaining,
    "summary": lambda found: text(totals(found)),
    "provenance": provenance,
}


def read(name):
    """Return a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def files():
    """Return the fragments that this script writes, by name."""
    results = read("frontier")
    found = Frontier(results)
    made = {name: make(found) for name, make in FILES.items()}
    return made | {"earlier": earlier_table(found, Earlier(results))}


def write(made):
    """Write fragments of frontier.md."""
    for name, content in made.items():
        (PARTS / f"frontier-{name}.md").write_text(content, "utf-8")


if __name__ == "__main__":
    write(files())
    (PARTS / "frontier.svg").write_bytes(picture(Frontier(read("frontier"))))
