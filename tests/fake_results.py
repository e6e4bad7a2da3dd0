"""Tables of results made by hand, so that claims can be fed what would make them fail."""

import numpy as np

from fissile.lab.frame import table
from fissile.lab.trial import Arm, Boolean, Trial


def invented(value, arms=("dense", "clause-4", "random-4"), cells=None, trials=5, noise=0.2):
    """A table in which ``value(arm, clauses, neurons)`` gives the measures of a cell's mean.

    Trials scatter around the mean, the arms of a trial together and a little apart.
    """
    rng = np.random.default_rng(0)
    works, measures = [], {}
    for clauses, neurons in cells or [(8, h) for h in (4, 8, 16, 32)]:
        for number in range(trials):
            shared = rng.normal()
            for name in arms:
                split, _, alpha = name.partition("-")
                work = Trial(
                    Boolean(clauses), neurons, arm=Arm(split, int(alpha or 1)), number=number
                )
                means = value(name, clauses, neurons)
                works.append(work)
                measures[work.key] = {"nonzeros": 264.0} | {
                    measure: mean + noise * (shared + 0.2 * rng.normal()) * _unit(measure)
                    for measure, mean in means.items()
                }
    return table(works, measures)


def _unit(measure):
    return 0.01  # accuracies are shares, and the other measures are of order one
