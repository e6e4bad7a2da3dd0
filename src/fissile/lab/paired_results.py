"""What a paired experiment has found: verdicts, curves, and a sentence for each arm."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fissile._common.errors import needs
from fissile._common.progress import aligned, number_of
from fissile.lab.stats import ENOUGH, LEVEL, compare, interval, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DENSE = "dense"
_COLUMNS = ("arm", "non-zeros", "score", "difference", "95 %", "at the split", "rounds to recover")


@dataclass(frozen=True)
class ArmVerdict:
    """What came of an arm against the dense one, trial by trial, after the last round.

    >>> verdict = found.verdicts[0]
    >>> verdict.difference, verdict.low, verdict.high

    ``p`` and the interval are corrected for the number of arms (Bonferroni): all intervals hold
    together with 95 %. ``drop`` is what the split itself cost, before any training; after
    ``recovery`` rounds the mean was back where it was (None: never).
    """

    arm: str
    score: float
    difference: float
    low: float
    high: float
    p: float
    drop: float
    recovery: int | None
    trials: int
    unit: str = ""

    @property
    def interval(self) -> str:
        """Return the 95 % interval of the difference as text; one trial has none."""
        ends = (_signed(value, self.unit, "") for value in (self.low, self.high))
        return " to ".join(ends) if self.trials > 1 else ""

    @property
    def sentence(self) -> str:
        """Return in words what came out."""
        if self.trials < ENOUGH:
            said = f"too few trials to tell ({self.trials} of at least {ENOUGH})"
        elif self.p < LEVEL:
            said = "gain from splitting" if self.difference > 0 else "splitting costs"
        else:
            said = "no gain from splitting" if self.difference <= 0 else "no clear gain"
        numbers = f"{_signed(self.difference, self.unit)}{self.unit}"
        if self.trials > 1:
            numbers += f", 95 % {self.interval}"
        return f"{self.arm}: {said}: {numbers}."


@dataclass(frozen=True)
class Experiment:
    """The results of :func:`fissile.experiment`.

    >>> print(found)
    >>> found.curve("random-2").mean(0)  # the scores after the split, and after every round

    ``warm`` has the scores of every trial after each round of its warm-up; ``scores`` those of
    every arm, the first right after the split; ``nonzeros`` the weights that are not zero.
    """

    warm: tuple[tuple[float, ...], ...]
    scores: Mapping[str, tuple[tuple[float, ...], ...]]
    nonzeros: Mapping[str, tuple[int, ...]]

    def curve(self, arm: str) -> NDArray[np.float64]:
        """Return an arm's scores: a row for each trial, the first column right after the split."""
        return np.array(self.scores[arm], dtype=float)

    @property
    def _points(self) -> bool:
        """Whether scores are shares, whose differences are told in points of a hundred."""
        every = [np.array(self.warm), *map(self.curve, self.scores)]
        return all(((one >= 0) & (one <= 1)).all() for one in every)

    @property
    def verdicts(self) -> tuple[ArmVerdict, ...]:
        """Return a verdict for every arm but the dense one."""
        scale, unit = (100, " points") if self._points else (1, "")
        before, dense = np.array(self.warm)[:, -1], self.curve(DENSE)[:, -1]
        others = [arm for arm in self.scores if arm != DENSE]
        found = []
        for arm in others:
            curve = scale * self.curve(arm)
            differences = curve[:, -1] - scale * dense
            low, high = interval(differences, LEVEL / len(others))
            p = min(1.0, compare(curve[:, -1], scale * dense).p * len(others))
            back = np.flatnonzero(curve.mean(0) >= scale * before.mean())
            last, drop = float(curve[:, -1].mean()), float((scale * before - curve[:, 0]).mean())
            change, recovery = float(differences.mean()), int(back[0]) if len(back) else None
            known = low, high, p, drop, recovery
            found.append(ArmVerdict(arm, last, change, *known, len(dense), unit))
        return tuple(found)

    def _rows(self) -> list[tuple[str, ...]]:
        scale = 100 if self._points else 1
        rows = []
        known = {one.arm: one for one in self.verdicts}
        for arm in self.scores:
            last = summary(scale * self.curve(arm)[:, -1])
            error = f" ± {last.error:.2g}" if last.count > 1 else ""
            counts = " to ".join(f"{n:,}" for n in sorted({*_ends(self.nonzeros[arm])}))
            row = [arm, counts, f"{last.mean:.4g}{error}"]
            if (one := known.get(arm)) is not None:
                back = "never" if one.recovery is None else str(one.recovery)
                drop = _signed(-one.drop, one.unit)
                row += [_signed(one.difference, one.unit), one.interval, drop, back]
            rows.append((*row, *[""] * (len(_COLUMNS) - len(row))))
        return rows

    @property
    def _note(self) -> str:
        unit = "Scores are in %, differences in points. " if self._points else ""
        count = number_of(len(self.warm), "trial")
        return f"{unit}{count}, paired; the intervals hold together, for all arms."

    def __repr__(self) -> str:
        """Show the counts; printed, it is the whole table."""
        return f"Experiment(arms: {', '.join(self.scores)}; trials: {len(self.warm)})"

    def __str__(self) -> str:
        """Show the table and a sentence for each arm."""
        lines = aligned([_COLUMNS, *self._rows()], right=range(1, len(_COLUMNS)))
        return "\n".join([*lines, "", *(one.sentence for one in self.verdicts), self._note])

    def _repr_html_(self) -> str:
        cells = [("th", _COLUMNS), *(("td", row) for row in self._rows())]
        rows = (
            "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) for tag, texts in cells
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        said = "<br>".join(html.escape(one.sentence) for one in self.verdicts)
        return f"<table>{body}</table><p>{said}</p><p>{html.escape(self._note)}</p>"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        verdicts = [vars(one) | {"sentence": one.sentence} for one in self.verdicts]
        verdicts = [{k: None if v != v else v for k, v in one.items()} for one in verdicts]
        held = {"warm": self.warm, "scores": dict(self.scores), "nonzeros": dict(self.nonzeros)}
        return {"verdicts": verdicts, **held}

    def plot(self) -> Figure:
        """Draw the curves, mean and standard error, and the differences with their intervals.

        >>> found.plot().savefig("experiment.png")
        """
        needs("matplotlib", "lab")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        scale, warm = 100 if self._points else 1, np.array(self.warm)
        split = warm.shape[1]
        _line(left, range(1, split + 1), scale * warm, label="warm-up", color="grey")
        for arm in self.scores:
            curve = self.curve(arm)
            _line(left, range(split, split + curve.shape[1]), scale * curve, label=arm)
        left.axvline(split, color="black", linewidth=0.8, linestyle="--")
        left.set(xlabel="rounds", ylabel="score, %" if self._points else "score")
        left.legend()
        for place, one in enumerate(self.verdicts):
            right.plot([one.low, one.high], [place, place], color=f"C{place + 1}")
            right.plot([one.difference], [place], "o", color=f"C{place + 1}")
        right.axvline(0, color="black", linewidth=0.8, linestyle="--")
        right.set_yticks(range(len(self.verdicts)), [one.arm for one in self.verdicts])
        right.set(xlabel=f"difference from dense{' in points' * self._points}, 95 %")
        return figure


def _line(axes: Any, x: range, curves: NDArray[np.float64], **look: Any) -> None:
    means = curves.mean(0)
    (drawn,) = axes.plot(x, means, **look)
    if len(curves) > 1:
        error = curves.std(0, ddof=1) / len(curves) ** 0.5
        axes.fill_between(x, means - error, means + error, color=drawn.get_color(), alpha=0.2)


def _ends(counts: tuple[int, ...]) -> tuple[int, int]:
    return min(counts), max(counts)


def _signed(value: float, unit: str, plus: str = "+") -> str:
    """Return a number with a sign, a minus as long as a plus; points have one decimal."""
    text = f"{abs(value):.1f}" if unit else f"{abs(value):.3g}"
    return f"−{text}" if value < 0 and float(text) else f"{plus}{text}"
