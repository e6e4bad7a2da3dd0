"""A small module of Lightning, its data, and runs that expand it."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fissile.integrations.lightning import ExpandAt

# What Lightning has to say about small machines and small data.
QUIET = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need.*"),
]

EPOCHS = 4


class Net(pl.LightningModule):
    def __init__(self, hidden: int = 6, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(8, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, 3)
        )
        self.rates: list[float] = []

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch, index):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch))

    def predict_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        adam = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        return [adam], [torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)]


def loader():
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 8, generator=draw), torch.randint(3, (24,), generator=draw)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def trainer(folder, *callbacks, **settings):
    defaults = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(default_root_dir=folder, callbacks=list(callbacks), **defaults | settings)


def fit(folder, module, *callbacks, ckpt_path=None, **settings):
    made = trainer(folder, *callbacks, **settings)
    made.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return made


def every_epoch(folder, **settings):
    return ModelCheckpoint(folder, "{epoch}", save_top_k=-1, **settings)


def cached(tmp_path_factory):
    """Runs of each kind, with a checkpoint after every epoch; each is trained once."""
    return functools.cache(lambda kind, value: _run(tmp_path_factory.mktemp("run"), kind, value))


def _run(folder, kind, value):
    module = Net()
    when = ExpandAt(2, **{kind: value})
    fit(folder, module, every_epoch(folder), when)
    return folder, module
