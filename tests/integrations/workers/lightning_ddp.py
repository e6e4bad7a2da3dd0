# Run by torchrun on two ranks: a Lightning run that expands under DDP, and two that resume it.

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytorch_lightning as pl
import torch
from parallel import adam, apart, everywhere, network
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fissile
from fissile.integrations.lightning import ExpandAt

EPOCHS, STEP = 3, 4  # the second epoch is steps 3, 4 and 5


class Net(pl.LightningModule):
    def __init__(self, seed=0):
        super().__init__()
        self.net = network(seed)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return adam(self)


class Wrappers(pl.Callback):
    """Lists what is around the module as it trains, each wrapper once."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        wrapper = trainer.strategy.model
        if not hasattr(wrapper, "was_seen"):
            wrapper.was_seen = True
            self.seen.append(type(wrapper).__name__)


def samples():
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 12, generator=draw), torch.randint(3, (24,), generator=draw)
    return TensorDataset(x, y)


def together(folder, seed=0, checkpoint=None):
    module, wrappers = Net(seed), Wrappers()
    keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=120)),
        use_distributed_sampler=False,  # Lightning's own would shuffle
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keep, ExpandAt(2, step=STEP), wrappers],
    )
    sampler = DistributedSampler(samples(), 2, int(os.environ["RANK"]), shuffle=False)
    loader = DataLoader(samples(), batch_size=4, sampler=sampler)
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return module, wrappers.seen


def alone():
    module = Net()
    optimizer = adam(module)
    loader = DataLoader(samples(), batch_size=8)
    for step, batch in enumerate(batch for _ in range(EPOCHS) for batch in loader):
        if step == STEP:
            fissile.expand(module, 2, optimizer=optimizer, inplace=True)
        optimizer.zero_grad()
        module.training_step(batch, step).backward()
        optimizer.step()
    return module


def main(folder):
    torch.set_num_threads(1)
    module, wrappers = together(folder)
    found = {
        "wrappers": wrappers,
        "parameters_same": everywhere(module.parameters()),
        "owners_same": everywhere(module.buffers()),
        "nonzeros": fissile.nonzeros(module).weights,
        "apart": apart(module.state_dict().values(), alone().state_dict().values()),
    }
    for epoch in range(EPOCHS - 1):
        again, _ = together(folder / "again", 5, folder / f"epoch={epoch}.ckpt")
        found[f"resumed_{epoch}"] = apart(again.parameters(), module.parameters())
    (folder / f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
