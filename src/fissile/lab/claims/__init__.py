"""The paper's claims as checks that can fail.

>>> Claim("Clause splits beat the dense network.", "section 4.2", Beats("clause-4"))

A check looks at a table of results (see :mod:`fissile.lab.frame`) and returns a verdict: it holds,
it fails, it is not significant, or there is no data to judge it by.
"""

from fissile.lab.claims.arms import Alike, Beats, Leads, Often, Together
from fissile.lab.claims.numbers import Best, Equivalent, Near, Reaches, WarmedUp
from fissile.lab.claims.trends import Explains, Flatter, Levels, Trend
from fissile.lab.claims.verdict import Check, Claim, Status, Verdict

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
]
