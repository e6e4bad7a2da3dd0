"""The key of a result: equal for equal trials, whoever runs them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass
from typing import Any

__all__ = ["LATER", "REVISION", "key_of"]

#: Raised when the same trial would come to other numbers, so that stored ones are not mixed in. A
#: last digit that depended on the number of threads anyway (mean cosines, before they were summed
#: in float64) is not such a number.
REVISION = 1
#: Of a field that trials did not always have: at its default, the key is what it was before.
LATER = {"later": True}


def key_of(work: Any, **more: str) -> str:
    """Return the name that a trial's result is stored under.

    >>> len(key_of(Trial()))
    32

    ``more`` is what decides the result besides the trial's own fields.
    """
    spec = {"revision": REVISION, "kind": work.kind, **_spec(work), **more}
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _spec(part: Any) -> dict[str, Any]:
    """Return a part of a trial as plain values, later fields only where they say something."""
    found = {}
    for one in fields(part):
        value = getattr(part, one.name)
        at_default = one.metadata.get("later") and value == one.default
        if not at_default and not one.metadata.get("label"):
            found[one.name] = _spec(value) if is_dataclass(value) else value
    return found
