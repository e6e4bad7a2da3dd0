"""Many small networks trained as one program."""

from fissile._common.errors import check_device
from fissile.bank.bank import Bank, Group, Member, Progress
from fissile.bank.spec import Arm, Data, Dense, DropConnect, Dynamic, Expand, Spec

__all__ = [
    "Arm", "Bank", "Data", "Dense", "DropConnect", "Dynamic", "Expand", "Group", "Member",
    "Progress", "Spec", "check_device",
]  # fmt: skip
