"""The paper as an instrument: a page that trains whole experiments as its sliders move."""

from fissile.play.experiment import events
from fissile.play.settings import PRESETS, Settings

__all__ = ["PRESETS", "Settings", "events"]
