"""The tables of the search that the recipe's settings for large budgets come from."""

from math import log
from statistics import mean

from frontier_text import rows, setting, text

from fissile.bank.sparse import presets

#: How many of the best plans are listed.
SHOWN = 6
#: What two plans must share to be the same but for their width.
FIELDS = ("direct", "lr", "decay", "dropout", "smooth", "prune")
_PRUNED = {"begin": 0.1, "end": 0.75, "saliency": "second-order", "power": 5.0}


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
        for plan in presets.plans(point[1], one["inputs"], one["outputs"]):
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


def best(found):
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


def chosen(found):
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
