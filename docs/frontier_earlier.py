"""The table of earlier runs: what the recipe came to before its settings were changed, and now."""

from frontier_results import OURS, WORDS, word
from frontier_text import chance, rows, signed, text

from fissile.bank.sparse.presets import is_large


def changed(found):
    """List the points whose budget holds a linear classifier: there the recipe has other plans."""
    return [
        (one["set"], budget)
        for one in found.sets
        for budget in one["budgets"]
        if is_large(budget, one["inputs"], one["outputs"])
    ]


def table(found, earlier):
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
