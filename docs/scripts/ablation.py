"""The tables of frontier.md on single changes to the methods, and on the search for the recipe.

    python docs/scripts/ablation.py && python docs/scripts/include.py

Reads ablation.json and recipe-search.json in benchmarks/results; writes frontier-ablation*.md and
frontier-search*.md into docs/parts.
"""

from math import log
from statistics import mean

from frontier import WORDS, Frontier, read, rows, setting, signed, text, word, write

from fissile.bank.sparse import plan as presets
from fissile.lab.budget_methods import METHODS

#: Every arm that was run, and what is other than in the method it is compared with.
ARMS = {
    "recipe-magnitude": "pruned by magnitude",
    "recipe-one-shot": "pruned at once, after half of the epochs",
    "recipe-slower": "pruned from 20 % of the training on, along a cubic",
    "recipe-no-direct": "a hidden layer alone",
    "recipe-direct": "direct weights in every setting",
    "recipe-linear": "a linear classifier alone",
    "recipe-plain": "no decay, dropout or smoothing",
    "recipe-rewired": "masks move as well, to large gradients",
    "recipe-split": "a quarter of the neurons, split in four at 10 %",
    "fpe-4-layer": "each layer keeps as many weights as it had",
    "fpe-4-erdos-renyi": "layers share by Erdős and Rényi's rule",
    "fpe-4-normalized": "magnitudes over their layer's root mean square",
    "fpe-4-lamp": "LAMP's scores instead of magnitudes",
    "fpe-4-saliency": "second-order saliency instead of magnitudes",
    "fpe-16-saliency": "second-order saliency instead of magnitudes",
    "fpe-4-rewired": "masks move after the split, to large gradients",
    "fpe-4-scaled": "the copied columns are halved",
    "fpe-4-gram": "inputs dealt by their Gram matrix",
    "fpe-4-activation": "inputs that are active together stay together",
    "fpe-4-gradient": "inputs that are pulled together stay together",
    "fpe-4-early": "split after a fifth of the epochs",
    "fpe-2-then-2": "split in two twice, at 35 % and at 65 %",
    "fpe-4-again": "the rate rises again after the split",
}
#: One neuron, which may die: what happens here would drown the other data sets' mean.
FRAIL = "fashionmnist", 805
#: How many of the best plans are listed.
SHOWN = 6
#: What two plans must share to be the same but for their width.
FIELDS = ("direct", "lr", "decay", "dropout", "smooth", "prune")
_PRUNED = {"begin": 0.1, "end": 0.75, "saliency": "second-order", "power": 5.0}


# --- one thing changed


class Ablation(Frontier):
    """Accuracies of every arm, and how it compares with the method that it changes."""

    @property
    def arms(self):
        """The arms, without what they are compared with."""
        return [name for name in ARMS if name in self.methods]

    @property
    def removed(self):
        """The arms that the code no longer has."""
        return [name for name in self.arms if name not in METHODS]

    def change(self, point, arm):
        """Compare an arm with what it changes, over its five trials."""
        return self.against(point, arm, base(arm))

    def counts(self, arm, points=()):
        """Count better, level and worse."""
        found = [word(self.change(point, arm)) for point in points or self.points()]
        return [found.count(one) for one in WORDS]

    def places(self, place):
        """List the points of the smallest, the middle or the largest budget."""
        return [(one["set"], one["budgets"][place]) for one in self.sets]

    def gain(self, arm, place):
        """Return the mean difference over data sets at one of the three budgets, but for one."""
        points = [point for point in self.places(place) if point != FRAIL]
        return sum(self.change(point, arm).difference for point in points) / len(points)

    def collapsed(self, arm):
        """Count the trials at the frail point whose network gives the same answer to everything."""
        return sum(value == 10.0 for value in self.accuracy(FRAIL, arm))


def base(arm):
    """Return what an arm changes.

    >>> base("fpe-2-then-2")
    'fpe-4'
    """
    return next((one for one in ("recipe", "fpe-16") if arm.startswith(one)), "fpe-4")


def summary_table(found):
    """Return every arm on a line: how often it helps, and how much."""
    parts = []
    for name, wanted in (("the recipe", True), ("the paper's split", False)):
        arms = [arm for arm in found.arms if (base(arm) == "recipe") == wanted]
        head = [
            name, "what is changed", "better/level/worse", "smallest, features",
            "FashionMNIST, 805", "about 6,300", "about 40,000", "worst", "best",
        ]  # fmt: skip
        parts += [*rows(head, [_line(found, arm) for arm in arms]), ""]
    lost = [f"{arm} {found.collapsed(arm)}" for arm in found.arms if found.collapsed(arm)]
    parts += [
        "Trials of five in which FashionMNIST's network of 805 gives one answer to everything "
        f"(10.00 %): {', '.join(lost)}; of fpe-4 itself, {found.collapsed('fpe-4') or 'none'}."
    ]
    if found.removed:
        parts += ["", f"† Removed from the code since; commit {commit(found)} has it."]
    return text(parts)


def commit(found):
    """Return the commit that the arms ran at, in short."""
    return ", ".join(name[:7] for name in found.about["commit"])


def _line(found, arm):
    gains = [signed(found.gain(arm, place)) for place in range(3)]
    ranked = sorted(found.points(), key=lambda point: found.change(point, arm).difference)
    ends = [_at(found, arm, point) for point in (ranked[0], ranked[-1])]
    frail = signed(found.change(FRAIL, arm).difference)
    counts = "/".join(map(str, found.counts(arm)))
    return [_name(found, arm), ARMS[arm], counts, gains[0], frail, *gains[1:], *ends]


def _at(found, arm, point):
    return f"{signed(found.change(point, arm).difference)} ({point[0]} {point[1]:,})"


def _name(found, arm):
    return f"{arm} †" if arm in found.removed else arm


def full_table(found):
    """Return all accuracies, and differences, a table for every data set."""
    lines = []
    for one in found.sets:
        points = [(one["set"], budget) for budget in one["budgets"]]
        body = []
        for kind in ("recipe", "fpe-4", "fpe-16"):
            body.append([f"**{kind}**", *(f"{found.mean(point, kind):.2f}" for point in points)])
            for arm in (arm for arm in found.arms if base(arm) == kind):
                body.append([_name(found, arm), *(_cell(found, point, arm) for point in points)])
        head = ["arm", *(f"{budget:,}" for _, budget in points)]
        lines += [f"### {one['title']}: one thing changed", "", *rows(head, body), ""]
    return text(lines[:-1])


def _cell(found, point, arm):
    change = found.change(point, arm)
    shown = signed(change.difference)
    return f"{found.mean(point, arm):.2f}, {f'**{shown}**' if change.significant else shown}"


def provenance(found):
    """Say when and where the arms ran, as their rows have it."""
    about = found.about
    return text(
        [
            f"{about['trials']:,} trials and their searches, {about['seconds']} seconds in all on "
            f"one {', '.join(about['device'])}, {about['finished'][1][:10]}, commit "
            f"{commit(found)}; those of the recipe, fpe-4 and fpe-16 are the frontier's. "
            f"`{about['command']}`"
        ]
    )


# --- the search for the recipe's settings for large budgets


class Search:
    """Held-out accuracies of every plan at every point, and where the recipe's six stand."""

    def __init__(self, results, sets):
        self.about, self.plans = results["about"], results["plans"]
        self.sets = {one["set"]: one for one in sets}
        self.points = [(one["set"], one["budget"]) for one in results["points"]]
        self.seeds = [len(one["seeds"]) for one in results["points"]]

    def mean(self, plan, point):
        """Return a plan's mean accuracy over its seeds."""
        return mean(plan["held_out"][self.points.index(point)])

    def best(self, point):
        """List all plans, the best first."""
        return sorted(self.plans, key=lambda plan: -self.mean(plan, point))

    def place(self, plan, point):
        """Return how a plan stands; equal plans share a place."""
        own = self.mean(plan, point)
        return 1 + sum(self.mean(other, point) > own for other in self.plans)

    def chosen(self, point):
        """Return the recipe's six plans for a point, each with the searched plan next in width."""
        one = self.sets[point[0]]
        found = []
        for plan in presets.recommended_plans(point[1], one["inputs"], one["outputs"]):
            alike = [other for other in self.plans if _same(other["plan"], plan)]
            near = min(alike, key=lambda other: abs(log(other["plan"]["hidden"] / plan.hidden)))
            found.append((plan, near))
        return found


def _same(told, plan):
    """Tell whether a searched plan is one of the recipe's, but for its width."""
    if any(name in told for name in ("start", "rewire", "splits")) or told["prune"] != _PRUNED:
        return False
    return all(told[name] == getattr(plan, name) for name in FIELDS[:-1])


def described(plan):
    """Say what a searched plan is, in a few words."""
    parts = [setting(plan, "+ linear" if plan["direct"] else "neurons")]
    prune = plan["prune"]
    if prune is None:
        parts.append("RigL")
    elif prune != _PRUNED and "splits" not in plan:
        power = {3.0: "cubic", 5.0: "power 5"}[prune["power"]]
        parts.append(f"{prune['saliency']} {prune['begin']:g} to {prune['end']:g}, {power}")
    elif "rewire" in plan:
        parts.append("masks move")
    parts += ["split in four"] if "splits" in plan else []
    return ", ".join(parts)


def search_best(found):
    """List the best plans of every point."""
    lines = []
    for point in found.points:
        ours = [near for _, near in found.chosen(point)]
        shown = []
        for plan in found.best(point)[:SHOWN]:
            told = f"{described(plan['plan'])} ({found.mean(plan, point):.2f})"
            shown.append(f"**{told}**" if plan in ours else told)
        title = found.sets[point[0]]["title"]
        lines.append(f"- {title}, {point[1]:,}: {'; '.join(shown)}.")
    return text(lines)


def search_chosen(found):
    """Return where the recipe's six settings stand among all that were searched."""
    body = []
    for number in range(len(found.chosen(found.points[0]))):
        cells = []
        for point in found.points:
            plan, near = found.chosen(point)[number]
            other = "" if near["plan"]["hidden"] == plan.hidden else " ~"
            cells.append(f"{found.place(near, point)} ({found.mean(near, point):.2f}){other}")
        body.append([str(number + 1), *cells])
    top = [f"{found.mean(found.best(point)[0], point):.2f}" for point in found.points]
    head = ["setting", *(f"{short} {budget:,}" for short, budget in found.points)]
    return text(rows(head, [["best of all", *top], *body]))


# --- the files


def files():
    """Return the fragments that this script writes, by name."""
    found = Ablation(read("ablation"))
    search = Search(read("recipe-search"), read("frontier")["sets"])
    return {
        "ablation": summary_table(found),
        "ablation-table": full_table(found),
        "ablation-provenance": provenance(found),
        "search-best": search_best(search),
        "search-chosen": search_chosen(search),
    }


if __name__ == "__main__":
    write(files())
