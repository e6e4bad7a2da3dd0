"""The progress bar, and durations as text."""

import pytest

from fissile._common.progress import ProgressBar, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.25, "1.2 s"), (42, "42 s"), (90, "2 min"), (5_400, "90 min"), (9_000, "2.5 h")],
)
def test_a_duration_is_short(seconds, text):
    assert duration(seconds) == text


def test_the_bar_counts_units_and_shows_more_lines(capsys):
    with ProgressBar("encoding", "images", lambda: ["one line more"]) as bar:
        bar.start(200, done=50)
        bar.note = "64/s"
        bar.advance(50)
    shown = capsys.readouterr().err
    assert "encoding" in shown
    assert "100 of 200 images, 64/s" in shown
    assert "one line more" in shown


def test_a_bar_that_never_starts_shows_nothing(capsys):
    with pytest.raises(ValueError, match="at once"), ProgressBar("encoding", "images"):
        raise ValueError("at once")
    assert capsys.readouterr().err == ""
