"""Packed layers on a processor: the wide network at the memory traffic of the narrow one.

A layer with one sample takes as long as its weights take to come from memory. Packed weights are no
more than the dense ones, so the children come almost for free: every weight is read once, and
vector instructions add it to the child that owns it.

* :mod:`~fissile.packed.cpu.partitioned`: the partitioned layer; a mask per child
  selects its weights.
* :mod:`~fissile.packed.cpu.masked`: the masked layer; stored groups are found by the bits set.

Nothing is compiled before the first call, and compiled code is kept on disk.
"""

from fissile.packed.cpu.linear import (
    bitmap_linear,
    bitmap_written,
    block,
    block_for_few,
    can_run,
    owned_linear,
    owned_written,
    takes,
)

__all__ = [
    "bitmap_linear",
    "bitmap_written",
    "block",
    "block_for_few",
    "can_run",
    "owned_linear",
    "owned_written",
    "takes",
]
