"""fissile: neurons split, parameters don't.

Fixed parameter expansion for PyTorch: split each neuron of a trained network into ``alpha`` sparse
children with disjoint inputs, prune back to the same number of non-zero weights, fine-tune.

>>> wide = fissile.expand(model, alpha=2, optimizer=adam)
"""

from typing import TYPE_CHECKING, Any

from fissile import bank, data, measure
from fissile._common.errors import FileError, FissileError
from fissile.discovery import Discovery, Place, discover
from fissile.expansion.budget import Allocation, NonZeros, nonzeros, register_allocation
from fissile.expansion.expand import dropconnect, expand, to_dense, to_masked
from fissile.expansion.rewire import Rewire
from fissile.expansion.split import (
    Blocks,
    Gram,
    Groups,
    Overlapping,
    Random,
    Split,
    Structured,
    register_split,
)
from fissile.expansion.summary import summary
from fissile.io.files import load, save
from fissile.layers import (
    DropConnectLinear,
    MaskedConv2d,
    MaskedLinear,
    PartitionedConv2d,
    PartitionedLinear,
)
from fissile.layers.mlp import MLP
from fissile.measure import theory
from fissile.measure.diagnose import Diagnosis, PlaceDiagnosis, diagnose
from fissile.packed import (
    PackedMaskedConv2d,
    PackedMaskedLinear,
    PackedPartitionedConv2d,
    PackedPartitionedLinear,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from fissile.lab.paired import experiment

__version__ = "0.1.0"

__all__ = [
    "MLP", "Allocation", "Blocks", "Diagnosis", "Discovery", "DropConnectLinear", "FileError",
    "FissileError", "Gram", "Groups", "MaskedConv2d", "MaskedLinear", "NonZeros", "Overlapping",
    "PackedMaskedConv2d", "PackedMaskedLinear", "PackedPartitionedConv2d",
    "PackedPartitionedLinear", "PartitionedConv2d", "PartitionedLinear", "Place", "PlaceDiagnosis",
    "Random", "Rewire", "Split", "Structured", "bank", "data", "diagnose", "discover",
    "dropconnect", "expand", "experiment", "load", "measure", "nonzeros", "pack",
    "register_allocation", "register_split", "save", "summary", "theory", "to_dense", "to_masked",
    "unpack",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what only the lab needs when it is asked for."""
    if name != "experiment":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fissile.lab.paired import experiment

    return experiment
