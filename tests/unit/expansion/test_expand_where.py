"""Which places are expanded, and the models that are refused."""

import pytest
import torch
from place_models import Deep, Plain
from torch import nn

from fissile import MLP, FissileError, expand, nonzeros
from fissile.layers import PartitionedLinear

GATES = [f"blocks.{i}.mlp.gate" for i in range(3)]
HEADS = ["head.layers.0", "head.layers.4"]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        (None, GATES + HEADS),
        ("blocks.*", GATES),
        ("blocks.1", GATES[1:2]),
        ("*.mlp", GATES),
        ("blocks.2.mlp.up", GATES[2:]),
        (["head.layers.2", "blocks.[02]"], [GATES[0], GATES[2], "head.layers.2"]),
        (["head.layers.0", "head.layers.2"], HEADS[:1]),
        (lambda place: place.kind == "mlp", HEADS),
        (lambda place: place.outputs == 2, HEADS[1:]),
    ],
)
def test_where_says_which_places(where, names):
    torch.manual_seed(0)
    dense = Deep()
    wide = expand(dense, 2, where=where)
    first = [n for n, m in wide.named_modules() if isinstance(m, PartitionedLinear)]
    assert sorted(n for n in first if not n.endswith("up")) == sorted(names)
    assert nonzeros(wide).weights == nonzeros(dense).weights
    assert wide(torch.randn(3, 6)).shape == (3, 2)


def test_the_rule_is_every_other_layer_from_the_first_chosen():
    wide = expand(MLP([6, 5, 5, 5, 5, 2]), 2, where=["layers.2", "layers.4", "layers.6"])
    kinds = [type(m).__name__ for m in wide.layers if hasattr(m, "in_features")]
    assert kinds == ["Linear", "PartitionedLinear", "MaskedLinear", "PartitionedLinear",
                     "MaskedLinear"]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere", r"'nowhere' matches no place.*'blocks.0.mlp.gate'"),
        ("head.layers.6", r"matches no place.*'head.layers.6': its output is what"),
        (["blocks.0", "block.1"], r"where='block.1' matches no"),
        (lambda place: False, "where chose none of"),
        ([], "neither a name"),
        ([3], "neither a name"),
        (3, "neither a name"),
    ],
)
def test_a_where_that_finds_nothing_is_refused(where, message):
    with pytest.raises(FissileError, match=message):
        expand(Deep(), 2, where=where)


def test_wrapped_models_are_refused():
    compiled = torch.compile(MLP([6, 4, 2]), backend="eager")
    with pytest.raises(FissileError, match=r"wrapped in OptimizedModule.*expand before wrapping"):
        expand(compiled, 2)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(MLP([6, 4, 2]))
        with pytest.raises(FissileError, match="expand before wrapping"):
            expand(nn.Sequential(wrapped), 2)
        sharded = MLP([6, 4, 2])
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        torch.distributed.fsdp.fully_shard(sharded, mesh=mesh)
        with pytest.raises(FissileError, match=r"FSDPModule.*expand before wrapping"):
            expand(sharded, 2)
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_no_model_is_refused():
    with pytest.raises(FissileError, match=r"an nn.Module, not a NoneType"):
        expand(None, 2)


def test_a_norm_that_serves_others_too_is_refused():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Plain(6, 4, 6), Plain(6, 4, 6)
            self.one.norm = self.two.norm = nn.Identity()
            self.norm = nn.LayerNorm(4, elementwise_affine=False)

        def forward(self, x):
            for part in (self.one, self.two):
                x = part.two(self.norm(part.one(x)).relu())
            return x

    with pytest.raises(FissileError, match=r"'norm' is called 2 times"):
        expand(Shared(), 2)
