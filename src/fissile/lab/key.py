"""The key that a trial is stored under: a hash of everything that decides its result."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any

#: Raised when the same trial would come to other numbers, so that stored ones are not mixed in. A
#: last digit that depended on the number of threads anyway (mean cosines, before they were summed
#: in float64) is not such a number.
REVISION = 1


def around_number(work: Any) -> tuple[str, str]:
    """Return everything that decides a result as text: what comes before the number, and after."""
    spec = {"revision": REVISION, "kind": work.kind, **_spec(work)}
    if (plans := getattr(work, "plans", None)) is not None:
        spec["plans"] = repr(plans)  # whoever changes a method's plans gets new results
    early = {name: value for name, value in spec.items() if name < "number"}
    late = {name: value for name, value in spec.items() if name > "number"}
    texts = [json.dumps(part, sort_keys=True, separators=(",", ":")) for part in (early, late)]
    return f'{texts[0][:-1]},"number":', f",{texts[1][1:]}"


def _spec(part: Any) -> dict[str, Any]:
    """Return a part of a trial as plain values, later fields only where they say something."""
    spec = {}
    for item in fields(part):
        value = getattr(part, item.name)
        at_default = item.metadata.get("later") and value == item.default
        if not at_default and not item.metadata.get("label"):
            spec[item.name] = _spec(value) if is_dataclass(value) else value
    return spec


def hashed(text: str) -> str:
    """Return a hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Keyed:
    """A trial of any kind."""

    @cached_property
    def key(self: Any) -> str:
        """The name that the result is stored under: equal for equal trials, whoever runs them."""
        before, after = around_number(self)
        return hashed(f"{before}{self.number}{after}")
