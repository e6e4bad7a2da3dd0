"""The paper's claims as checks that can fail.

>>> Claim("Clause splits beat the dense network.", "section 4.2", Beats("clause-4"))

A check looks at a table of results (see :mod:`fissile.lab.frame`) and returns a verdict: it holds,
it fails, it is not significant, or there is no data to judge it by.
"""

from fissile.lab.claims.comparisons import (
    Alike,
    Beats,
    Check,
    Claim,
    Leads,
    Often,
    Status,
    Together,
    Verdict,
)
from fissile.lab.claims.numbers import (
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
