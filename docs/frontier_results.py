"""The results of the study frontier, and how its methods compare."""

from fissile.lab.stats import compare, summary

OURS = "recipe"
FPE = ("fpe-2", "fpe-4", "fpe-8", "fpe-16")
#: What a method may be against another; without a p-value below 0.05 they are level.
WORDS = ("better", "level", "worse")


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
