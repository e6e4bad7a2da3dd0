"""The bank on a processor: one compiled call trains small MLPs for many epochs.

A call holds no lock, so a pool of threads trains thousands of networks side by side, and none
depends on the others. It agrees with :func:`fissile.bank.loop.fit`: the same order of samples,
loss, penalties and Adam.

* A removed weight does not exist: a :class:`Wiring` lists the inputs each neuron has, so that an
  expanded network costs no more than the dense one.
* A batch is turned on its side, features by samples: each weight then meets a whole row of samples,
  in registers. Batches of any size go through in tiles of ``LANES`` samples.
"""

from fissile.bank.cpu.kernel import Dials, Trained, train_networks
from fissile.bank.cpu.layout import Architecture, Samples, Wiring

__all__ = ["Architecture", "Dials", "Samples", "Trained", "Wiring", "train_networks"]
