# Run by torchrun on two ranks: every check puts what it found into a file for each rank.

import copy
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fissile
from fissile._common.errors import FissileError
from fissile.integrations.parallel import check_same


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 10, bias=False),  # an embedding, which no expansion touches
        nn.Linear(10, 7),
        nn.LayerNorm(7),
        nn.ReLU(),
        nn.Linear(7, 3),
    )


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(model, optimizer, steps, part):
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 12, generator=draw), torch.randint(3, (8,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


def half():
    rank = distributed.get_rank()
    return slice(4 * rank, 4 * rank + 4)


def everywhere(tensors):
    """Tell whether all ranks hold the very same tensors."""
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    ranks = [torch.empty_like(flat) for _ in range(distributed.get_world_size())]
    distributed.all_gather(ranks, flat)
    return all(torch.equal(flat, other) for other in ranks)


def apart(tensors, others):
    """Return the largest difference between two lists of tensors."""
    pairs = zip(tensors, others, strict=True)
    return max(float((one.double() - other.double()).detach().abs().max()) for one, other in pairs)


def refusal(function, *arguments):
    try:
        function(*arguments)
    except FissileError as error:
        return str(error)
    return None


def ddp_expanded_before():
    wide = fissile.expand(network(), 2)
    alone = copy.deepcopy(wide)
    check_same(wide)
    same = everywhere(wide.buffers())
    wrapped = DistributedDataParallel(wide)
    train(wrapped, adam(wrapped), 3, half())
    train(alone, adam(alone), 3, slice(None))
    return {
        "owners_same": same and everywhere(wide.buffers()),
        "parameters_same": everywhere(wide.parameters()),
        "apart": apart(wide.parameters(), alone.parameters()),
        "moved": apart(wide.parameters(), fissile.expand(network(), 2).parameters()),
        "nonzeros": fissile.nonzeros(wide).weights,
        "really": sum(int(torch.count_nonzero(wide[i].weight)) for i in (0, 1, 4)),
    }


def ddp_expanded_in_the_middle(inplace=False):
    alone = network()
    lone = adam(alone)
    train(alone, lone, 2, slice(None))
    alone = fissile.expand(alone, 2, optimizer=lone)
    train(alone, lone, 3, slice(None))
    wrapped = DistributedDataParallel(network())
    optimizer = adam(wrapped)
    train(wrapped, optimizer, 2, half())
    wide = fissile.expand(wrapped.module, 2, optimizer=optimizer, inplace=inplace)
    check_same(wide)
    wrapped = DistributedDataParallel(wide, broadcast_buffers=not inplace)
    train(wrapped, optimizer, 3, half())
    return {
        "owners_same": apart(wide.buffers(), alone.buffers()) == 0,
        "parameters_same": everywhere(wide.parameters()),
        "apart": apart(wide.parameters(), alone.parameters()),
        "nonzeros": fissile.nonzeros(wide).weights,
    }


def ddp_expanded_in_place():
    return ddp_expanded_in_the_middle(inplace=True)


def ddp_expanded_after():
    return refusal(fissile.expand, DistributedDataParallel(network()), 2)


def ranks_that_differ():
    rank = distributed.get_rank()
    return {
        "weights": refusal(check_same, fissile.expand(network(seed=rank), 2)),
        "seed": refusal(check_same, fissile.expand(network(), 2, seed=rank)),
        "alpha": refusal(check_same, fissile.expand(network(), 2 + rank)),
        "one_expanded": refusal(check_same, fissile.expand(network(), 2) if rank else network()),
        "none": refusal(check_same, fissile.expand(network(), 2, seed=3)),
    }


def sharded(model):
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_expanded_before():
    wide = fissile.expand(network(), 2)
    alone, empty = copy.deepcopy(wide), fissile.expand(network(seed=9), 2)
    check_same(wide)
    sharded(wide)
    train(wide, adam(wide), 3, half())
    train(alone, adam(alone), 3, slice(None))
    whole = get_model_state_dict(wide, options=StateDictOptions(full_state_dict=True))
    empty.load_state_dict(whole)
    check_same(wide)
    return {
        "sharded": [tuple(p.to_local().shape) for p in wide.parameters()],
        "apart": apart([p.full_tensor() for p in wide.parameters()], alone.parameters()),
        "loaded": apart(empty.state_dict().values(), alone.state_dict().values()),
        "nonzeros": [wide[1].nonzeros(), wide[4].nonzeros()],
        "nonzeros_alone": [alone[1].nonzeros(), alone[4].nonzeros()],
    }


def fsdp_expanded_after():
    return refusal(fissile.expand, sharded(network()), 2)


CHECKS = (
    ddp_expanded_before,
    ddp_expanded_in_the_middle,
    ddp_expanded_in_place,
    ddp_expanded_after,
    ranks_that_differ,
    fsdp_expanded_before,
    fsdp_expanded_after,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    found = {}
    for check in CHECKS:
        try:
            found[check.__name__] = check()
        except Exception as error:  # the test that asks for it shall say so, the others go on
            found[check.__name__] = {"error": repr(error)}
    Path(sys.argv[1], f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
