"""The figure of frontier.md: accuracy over non-zeros, a panel for every data set."""

from io import BytesIO

from fissile.lab.plots.style import FULL, Look, styled

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
