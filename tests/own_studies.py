"""Studies in files of a user's own, for the tests."""

TOY = '''"""A claim about a function of the user's own."""

import torch

from fissile.lab.claims import Beats, Claim, Verdict
from fissile.lab.function import trials_of
from fissile.lab.study import Lines, Scale, Study

FACTOR = 2.0


def scaled(width):
    return FACTOR * width


def trial(settings, seed):
    better = settings["arm"] == "sparse"
    return {"loss": scaled(settings["width"]) + 0.1 * torch.rand(()).item() - better}


def rows(frame):
    return Verdict("holds", f"{len(frame)} rows")


STUDY = Study(
    id="toy",
    title="A toy",
    artefact="a paper of another kind",
    about="Nothing but numbers.",
    scales={"smoke": Scale(3, trials_of(trial, arm=("dense", "sparse"), width=(1, 2)))},
    figure=((Lines("width", "loss", ("dense", "sparse")),),),
    claims=(
        Claim(
            "Sparse is lower.",
            "Figure 1",
            Beats("sparse", "dense", "loss", ("width",), lower=True),
        ),
        Claim("There are rows.", "Figure 2", rows),
    ),
)
'''


def written(folder, *changes, name="toy.py", text=TOY):
    """Write a study's file, some of its text replaced, and return its path."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name
