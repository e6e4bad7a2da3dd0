"""The multiverse: the verdict on every claim under every reading of what the paper leaves open.

>>> found = gathered(store, nearest(store))
>>> summary(found.verdicts)[["claim", "share", "kind", "decides"]]

A multiverse analysis, after Steegen, Tuerlinckx, Gelman and Vanpaemel (2016). A reading breaks the
paper's own criterion in a study if, in more than a tenth of the cells, the network at the split is
below 95 % of converged. For studies of formulas without an embedding, those are the cells that
Figures 2 and 3 share, whatever cells a study has.
"""

from __future__ import annotations

import base64
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass, replace
from math import nan, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fissile._common.progress import number_of
from fissile.lab import plots
from fissile.lab.claims import Claim, Verdict
from fissile.lab.frame import described, pick
from fissile.lab.pages import rendered, whole_folder, write_csv
from fissile.lab.plots import style
from fissile.lab.readings import QUESTIONS, Reading, around, reading, text, under, within
from fissile.lab.results import Results, study_of
from fissile.lab.store import Run, Store
from fissile.lab.studies import CRITERION, STUDIES
from fissile.lab.study import Published
from fissile.lab.task import WITHIN
from fissile.lab.trial import Boolean, Trial, Work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

#: The share of a study's cells in which the warm-up must meet the paper's criterion.
CELLS = 0.9
#: A claim is robust if it holds in this share of the readings, refuted if it fails in this share.
#: It is fragile if it holds in some, and undecided if it holds in none and is not refuted.
LEAST = 0.9
FIGURES = "interference"  # the study of the cells that Figures 2 and 3 share
KINDS = ("robust", "fragile", "undecided", "refuted")


@dataclass(frozen=True)
class Multiverse:
    """What became of claims and tables: a row for each, and for each reading that is finished.

    ``unfinished`` says, by study, what the default and the readings that are begun still lack.
    """

    verdicts: DataFrame
    tables: DataFrame
    unfinished: Mapping[str, Mapping[str, str]]


def works(run: Run, *, full: bool = False) -> dict[str, tuple[list[Work], list[Work]]]:
    """Return the trials and the converged networks of a study, for each reading around a run."""
    study, found = study_of(run), {}
    for chosen in around(study, full=full):
        if run.scale == "smoke" and "samples" in chosen:
            continue  # the smallest scale keeps its few samples: it is there to be quick
        if run.scale == "quick" and "100000" in chosen.values() and len(chosen) > 1 and not full:
            continue  # two fifths of the time, which is for the paper's scale
        trials = study.works(run.scale, run.trials, _under(run, chosen).changes)
        task, embedding = (getattr(trials[0], name, None) for name in ("task", "embedding"))
        judge = STUDIES[FIGURES] if isinstance(task, Boolean) and embedding is None else study
        changes = _under(run, within(judge, chosen)).changes
        found[text(chosen)] = trials, judge.converged(run.scale, changes)
    return found


def begun(store: Store, run: Run) -> bool:
    """Return whether the store holds a trial of another reading than the study's own."""
    study = study_of(run)
    own = {work.key for work in study.works(run.scale, 1, run.changes)}
    others = (
        work.key
        for chosen in around(study) if len(chosen) == 1
        for work in study.works(run.scale, 1, _under(run, chosen).changes)
    )  # fmt: skip
    return bool(store.finished(key for key in others if key not in own))


def _under(run: Run, chosen: Reading) -> Run:
    """Return a run under a reading, whichever it had."""
    changes = {name: value for name, value in run.changes.items() if name != "reading"}
    return replace(run, changes=changes | ({"reading": text(chosen)} if chosen else {}))


def gathered(
    store: Store, runs: Iterable[Run], *, full: bool = False, kept: Collection[Work] | None = None
) -> Multiverse:
    """Judge every claim under each reading whose trials the store holds.

    >>> gathered(store, nearest(store, ["capacity"])).verdicts

    ``kept`` are the trials that were asked for, if some were left out.
    """
    import pandas

    verdicts, tables = list[dict[str, Any]](), list[dict[str, Any]]()
    unfinished = defaultdict[str, dict[str, str]](dict)
    for run in runs:
        known = dict[object, Verdict]()
        for words, parts in works(run, full=full).items():
            chosen = reading(words)
            trials, converged = ([w for w in p if kept is None or w in kept] for p in parts)
            rows, more = (store.rows(w.key for w in part) for part in (trials, converged))
            lack = _lack("trial", rows, trials) + _lack("converged network", more, converged)
            if lack and (words == "default" or rows or more):
                unfinished[run.study][words] = " and ".join(lack)
            if lack or not trials:
                continue
            study = under(study_of(run), words)
            results = Results(study, _under(run, chosen), trials, rows, converged, more)
            about = {"study": study.id, "reading": words, "met": _met(results)}
            for claim in study.claims:
                basis = claim.text, _basis(claim, results)
                verdict = known.get(basis) or claim.judge(results.frame, results.changed)
                if claim != CRITERION and verdict.status not in ("no data", "not tested here"):
                    row = {"verdict": verdict.status, "numbers": verdict.numbers}
                    own = {"claim": claim.text, "counted": basis not in known}
                    verdicts.append({**about, **own, **row})
                known[basis] = verdict
            if not results.apart:
                tables += [{**about, **_distance(one, results)} for one in study.published]
    columns = ["study", "reading", "met", "claim", "verdict", "numbers", "counted"]
    found = pandas.DataFrame(tables, columns=[*columns[:3], "table", "unit", "distance"])
    return Multiverse(pandas.DataFrame(verdicts, columns=columns), found.dropna(), unfinished)


def _lack(what: str, rows: Sized, works: Sized) -> list[str]:
    missing = len(works) - len(rows)
    return [f"{missing:,} of {number_of(len(works), what)}"] if missing else []


def _fewer(chosen: Reading) -> dict[str, Reading]:
    """Return, for each option of a reading, the same reading without it."""
    return {
        f"{name}={option}": {other: chosen[other] for other in chosen if other != name}
        for name, option in chosen.items()
    }


def _basis(claim: Claim, results: Results) -> object:
    """Return what decides a claim's verdict: trials of its arms, and the measures that it reads."""
    named, frame = set(_words(claim.check)), results.frame
    arms = [(work.arm.name if isinstance(work, Trial) else "", work.key) for work in results.works]
    about = named & {arm for arm, _ in arms}
    keys = frozenset(key for arm, key in arms if not about or arm == "dense" or arm in about)
    measures = named & (set(frame.columns) - set(described(frame)))
    accurate = not measures or measures & {"accuracy", "improvement", "per_parameter"}
    return repr(claim.check), keys, results.study.accuracy if accurate else ""


def _words(part: Any) -> Iterator[str]:
    """Yield every word of a check: names of arms, of measures and of axes."""
    if isinstance(part, str):
        yield part
    elif is_dataclass(part):
        for one in fields(part):
            yield from _words(getattr(part, one.name))
    elif isinstance(part, tuple):
        for one in part:
            yield from _words(one)


def _met(results: Results) -> bool:
    """Return whether the warm-up meets the paper's criterion, or nobody has measured it."""
    frame = results.frame
    part = frame[frame["arm"] == "converged"]
    if not len(part):
        return True
    share = (part["warm"] / part["accuracy"]).fillna(0.0)  # a network that diverged has nothing
    return bool((share >= WITHIN).mean() >= CELLS)


def _distance(published: Published, results: Results) -> dict[str, object]:
    """Return the root mean square difference of a table from the paper's, and its unit.

    Of features by another encoder, improvements over the dense network are compared.
    """
    frame, foreign = pick(results.frame, published.where), bool(results.foreign)
    ours = frame.groupby([published.along, "arm"])[published.measure].mean().to_dict()
    accuracy, differences = results.study.published[0].measure == "accuracy", list[float]()
    gains = published.measure == "improvement"  # which is over the dense network already
    for place, row in published.values.items():
        paper = {arm: one[0] if isinstance(one, tuple) else one for arm, one in row.items()}
        for arm, number in paper.items():
            if number is None or (place, arm) not in ours or (foreign and arm == "dense"):
                continue
            mean, unit = ours[place, arm], 1.0 if accuracy or gains else number / 100
            if foreign and not gains:
                mean = 100 * mean / ours.get((place, "dense"), nan)
                number = 100 * number / (paper["dense"] or nan)
            differences.append((mean - number) / unit)
    unit_name = "points of improvement" if foreign or gains else "points" if accuracy else "%"
    size = sqrt(sum(one * one for one in differences) / len(differences)) if differences else nan
    return {"table": published.table, "unit": unit_name, "distance": size}


# --- what it comes to


def summary(verdicts: DataFrame) -> DataFrame:
    """Return a row for each claim, those that hold most often first.

    >>> summary(gathered(store, runs).verdicts).set_index("claim")["kind"]

    A reading does not count where its other answers are not about a claim. Shares are of the
    readings that meet the paper's criterion; where none does, of those that break it. ``decides``
    is the option that changes a claim's share most, other answers being equal.
    """
    import pandas

    rows = []
    for (study, claim), part in verdicts.groupby(["study", "claim"], sort=False):
        counted = part[part["counted"]]
        apart, met = (counted[counted["met"] == kept] for kept in (False, True))
        judged = met if len(met) else apart
        share, fails = ((judged["verdict"] == status).mean() for status in ("holds", "fails"))
        kind = "robust" if share >= LEAST else "refuted" if fails >= LEAST else "fragile"
        default = part.loc[part["reading"] == "default", "verdict"]
        rows.append({
            "study": study,
            "claim": claim,
            "default": next(iter(default), "no data"),
            "share": share,
            "fails": fails,
            "readings": len(judged),
            "breaks": judged is apart,
            "share_apart": (apart["verdict"] == "holds").mean(),
            "apart": len(apart),
            "kind": "undecided" if kind == "fragile" and not share else kind,
            "decides": _decides(part),
        })  # fmt: skip
    found = pandas.DataFrame(rows)
    return found.sort_values(["share", "fails"], ascending=[False, True]) if rows else found


def _changes(part: DataFrame) -> dict[str, tuple[float, float]]:
    """Return, for each option, how it changes how often a claim holds, and how often it fails.

    Every reading with the option is compared with the same reading without it.
    """
    status = dict(zip(part["reading"], part["verdict"], strict=True))
    found = defaultdict[str, list[tuple[int, int]]](list)
    for words, verdict in status.items():
        for option, less in _fewer(reading(words)).items():
            if before := status.get(text(less)):
                pair = [(verdict == one) - (before == one) for one in ("holds", "fails")]
                found[option].append((pair[0], pair[1]))
    return {
        option: (sum(h for h, _ in each) / len(each), sum(f for _, f in each) / len(each))
        for option, each in found.items()
    }


def _decides(part: DataFrame) -> str:
    changes = _changes(part)
    most = max(changes, key=lambda one: tuple(map(abs, changes[one])), default="")
    holds, fails = changes.get(most, (0.0, 0.0))
    if not holds and not fails:
        return "none"
    return f"{most}: holds {holds:+.0%}" if holds else f"{most}: fails {fails:+.0%}"


def by_count(verdicts: DataFrame) -> dict[str, float]:
    """Return the options that would be defaults if one counted claims that hold.

    >>> by_count(found.verdicts)
    {'samples=100000': 2.5}

    Beside each is how many more claims hold with it, other answers being equal.
    """
    totals = defaultdict[str, float](float)
    for _, part in verdicts.groupby(["study", "claim"], sort=False):
        for option, (holds, _) in _changes(part).items():
            totals[option] += holds
    options = [[one for one in totals if one.startswith(f"{name}=")] for name in QUESTIONS]
    best = (max(each, key=totals.__getitem__) for each in options if each)
    return {option: totals[option] for option in best if totals[option] > 1e-9}


def _used(verdicts: DataFrame) -> set[str]:
    """Return the questions that some reading answers otherwise."""
    return {name for words in verdicts["reading"] for name in reading(words)}


def counted(verdicts: DataFrame) -> str:
    """Return a sentence on how many defaults would differ if one counted claims that hold."""
    others, asked = by_count(verdicts), _used(verdicts)
    which = ", ".join(f"{option} ({more:+.1f} claims)" for option, more in others.items())
    return (
        f"{len(others)} of {len(asked)} defaults would be others if one counted "
        f"claims that hold{f': {which}' if others else ''}."
    )


THRESHOLDS = (
    f"Robust: holds in at least {LEAST:.0%} of the readings. Refuted: fails in at least "
    f"{LEAST:.0%}. Undecided: holds in none and is not refuted. Fragile: all others."
)


# --- figure and page


def draw(verdicts: DataFrame, claims: DataFrame) -> Figure:
    """Return the figure: a row for each claim, a column for each reading, its options below.

    Readings that break the paper's criterion in a study stand apart, on the right.
    """
    sides = [
        part for met in (True, False)
        if len(part := verdicts[(verdicts["met"] == met) & verdicts["counted"]])
    ]  # fmt: skip
    options = [f"{q.name}={option.name}" for q in QUESTIONS.values() for option in q.options]
    used = {one for part in sides for words in part["reading"] for one in words.split(",")}
    options = [one for one in options if one in used]
    with style.styled():
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        widths = [max(4, side["reading"].nunique()) for side in sides]
        heights = 0.13 * len(claims), 0.11 * max(1, len(options))
        size = 6.2 + 0.05 * sum(widths), sum(heights) + 1.0
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.add_gridspec(2, len(sides), width_ratios=widths, height_ratios=heights)
        for column, side in enumerate(sides):
            above, below = (figure.add_subplot(grid[row, column]) for row in range(2))
            _fill(above, below, side, claims, options)
            met = bool(side["met"].iloc[0])
            above.set_title("within 95 % of converged" if met else "apart: not within 95 %")
            if column:
                above.set_yticklabels([])
                below.set_yticklabels([])
        handles = [Patch(color=c, label=s) for s, c in _COLOURS.items()]
        handles.append(Patch(color="white", label="white: not about the claim, or not tested"))
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        return figure


_COLOURS = {"not significant": "#D9D9D9", "holds": "#0072B2", "fails": "#D55E00"}


def _fill(
    above: Axes, below: Axes, side: DataFrame, claims: DataFrame, options: Sequence[str]
) -> None:
    """Draw the readings on one side: verdicts above, and below which options each has."""
    import numpy as np
    from matplotlib.colors import ListedColormap

    holds = side["verdict"].eq("holds").groupby(side["reading"]).mean()
    columns = list(holds.sort_values(ascending=False, kind="stable").index)
    rows = list(zip(claims["study"], claims["claim"], strict=True))
    cells = np.full((len(rows), len(columns)), np.nan)
    for one in side[side["verdict"].isin(_COLOURS)].to_dict("records"):
        place = rows.index((one["study"], one["claim"])), columns.index(one["reading"])
        cells[place] = list(_COLOURS).index(one["verdict"])
    colours = ListedColormap(list(_COLOURS.values()))
    above.imshow(cells, cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="none")
    labels = [
        f"{textwrap.shorten(f'{study}: {claim}', 110, placeholder='…')}  {share:.0%}"
        for (study, claim), share in zip(rows, claims["share"], strict=True)
    ]
    above.set_yticks(range(len(rows)), labels, fontsize=5, parse_math=False)
    above.set_xticks([])
    chosen = np.array([[option in words.split(",") for words in columns] for option in options])
    for row, column in zip(*np.nonzero(chosen), strict=True):
        below.plot(column, row, "s", color="black", markersize=1.2)
    below.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(options) - 0.5, -0.5), xticks=[])
    below.set_yticks(range(len(options)), options, fontsize=5)
    below.set_xlabel(f"{len(columns)} readings", fontsize=6)


def write(found: Multiverse, folder: Path) -> Path:
    """Write the page of a multiverse, with its figure and its numbers, and return the page.

    >>> write(gathered(store, runs), Path("multiverse"))
    PosixPath('multiverse/multiverse.html')
    """
    with whole_folder(Path(folder), "the multiverse") as beside:
        fill(found, beside)
    return Path(folder) / "multiverse.html"


def fill(found: Multiverse, folder: Path) -> None:
    """Write the files of a multiverse into a folder."""
    claims = summary(found.verdicts)
    figure = draw(found.verdicts, claims)
    paths = plots.save(figure, folder, "multiverse")
    for name, rows in (("", found.verdicts), ("-claims", claims), ("-tables", found.tables)):
        write_csv(folder / f"multiverse{name}.csv", rows.to_dict("records"))
    svg = next(path for path in paths if path.suffix == ".svg").read_bytes()
    used = {
        one.partition("=")[0] for words in found.verdicts["reading"] for one in words.split(",")
    }
    page = rendered(
        "multiverse.html.jinja",
        source=f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}",
        inches=figure.get_figwidth(),
        claims=claims.to_dict("records"),
        kinds={kind: int((claims["kind"] == kind).sum()) for kind in KINDS},
        tables=nearest_tables(found.tables).to_dict("records"),
        questions=[one for one in QUESTIONS.values() if one.name in used],
        readings=found.verdicts["reading"].nunique(),
        thresholds=THRESHOLDS,
        counted=counted(found.verdicts),
    )
    (folder / "multiverse.html").write_text(page, "utf-8", newline="\n")


def nearest_tables(tables: DataFrame) -> DataFrame:
    """Return each table's distance from the paper's under the default, and its nearest reading."""
    by_table = tables.groupby(["study", "table"], sort=False)
    found = tables.loc[by_table["distance"].idxmin()].set_index(["study", "table"])
    default = tables[tables["reading"] == "default"].set_index(["study", "table"])
    return found.assign(default=default["distance"], readings=by_table.size()).reset_index()
