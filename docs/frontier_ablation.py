"""The tables of the study ablation: what changes when one thing is changed."""

from frontier_results import WORDS, Frontier, word
from frontier_text import rows, signed, text

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
