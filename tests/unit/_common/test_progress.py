"""The progress bar, and durations as text."""

import pytest

from fissile._common.progress import ProgressBar, duration, number_of


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.25, "1.2 s"), (42, "42 s"), (90, "2 min"), (5_400, "90 min"), (9_000, "2.5 h")],
)
def test_a_duration_is_short(seconds, text):
    assert duration(seconds) == text


def test_one_of_a_thing_is_no_plural():
    numbers = (number_of(0, "trial"), number_of(1, "trial"), number_of(1_000, "trial"))
    assert numbers == ("0 trials", "1 trial", "1,000 trials")


def test_the_bar_counts_units_and_shows_more_lines(capsys):
    with ProgressBar("encoding", "image", lambda: ["one line more"]) as bar:
        bar.start(200, done=50)
        bar.note = "64/s"
        bar.advance(50)
    shown = capsys.readouterr().err
    assert "encoding" in shown
    assert "100 of 200 images, 64/s" in shown
    assert "one line more" in shown
    with ProgressBar("encoding", "image") as bar:
        bar.start(1)
    assert "0 of 1 image " in capsys.readouterr().err


def test_a_bar_that_never_starts_shows_nothing(capsys):
    with pytest.raises(ValueError, match="at once"), ProgressBar("encoding", "image"):
        raise ValueError("at once")
    assert capsys.readouterr().err == ""
