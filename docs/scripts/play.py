"""Compute the presets of `fissile play` for its still copy in the docs, into docs/still.

    python docs/scripts/play.py

A file for each preset holds the events that the page would be sent. Weights and samples are rounded
to what can be seen; accuracies stay as they are. FashionMNIST has to be installed.
"""

import json
from pathlib import Path

from fissile.play import PRESETS, events
from fissile.play.server import about

STILL = Path(__file__).parents[1] / "still"
#: Digits of what is only drawn; of pictures, whose pixels are many, fewer.
DIGITS = 4


def coarse(value, digits):
    """Return plain values with fewer digits."""
    if isinstance(value, dict):
        return {key: coarse(one, digits) for key, one in value.items()}
    if isinstance(value, list):
        return [coarse(one, digits) for one in value]
    return round(value, digits) if isinstance(value, float) else value


def still(settings):
    """Return the events of an experiment, as its file holds them."""
    digits = DIGITS if settings.boolean else DIGITS - 1
    found = []
    for event in filter(None, events(settings)):
        drawn = {key: coarse(event[key], digits) for key in ("network", "weights") if key in event}
        if "mistakes" in event:
            drawn["mistakes"] = coarse(event["mistakes"], 2)
        drawn |= {"seconds": None} if "seconds" in event else {}  # of another machine
        found.append(event | drawn)
    return found


def write(path, content):
    """Write JSON on one line: nobody reads it, and it is to be small."""
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n", "utf-8", newline="\n")


if __name__ == "__main__":
    STILL.mkdir(exist_ok=True)
    for preset in PRESETS:
        write(STILL / f"{preset.name}.json", still(preset.settings))
    write(STILL / "about.json", about() | {"still": True})
