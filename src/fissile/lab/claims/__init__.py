"""The paper's claims as checks that can fail.

>>> Claim("Clause splits beat the dense network.", "section 4.2", Beats("clause-4"))

A check looks at a table of results (see :mod:`fissile.lab.frame`) and returns a verdict: it holds,
it fails, it is not significant, or there is no data to judge it by. Where a claim tests several
cells, their p-values are corrected for their number by Holm's method.
"""

from fissile.lab.claims.arms import Alike, Beats, Leads, Often, Together
from fissile.lab.claims.trends import (
    Best,
    Equivalent,
    Explains,
    Flatter,
    Levels,
    Near,
    Reaches,
    Trend,
    WarmedUp,
)
from fissile.lab.claims.verdict import Check, Claim, Status, Verdict, counts

__all__ = [
    "Alike",
    "Beats",
    "Best",
    "Check",
    "Claim",
    "Equivalent",
    "Explains",
    "Flatter",
    "Leads",
    "Levels",
    "Near",
    "Often",
    "Reaches",
    "Status",
    "Together",
    "Trend",
    "Verdict",
    "WarmedUp",
    "counts",
]
