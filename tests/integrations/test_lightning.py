import copy
import csv
import pickle
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import pytorch_lightning as pl
import torch
from lightning_models import EPOCHS, QUIET, Net, cached, every_epoch, fit, loader
from networks import same
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy
from torch import nn

import fissile
import fissile.integrations.lightning as integration
from fissile._common.errors import FissileError
from fissile.integrations.lightning import ExpandAt

pytestmark = QUIET


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return cached(tmp_path_factory)


# Epoch 2 begins after 6 steps; step 7 lies in the middle of it.
MOMENTS = [("epoch", 2), ("step", 7)]


@pytest.mark.parametrize(("kind", "value"), MOMENTS)
def test_expands_in_the_middle_of_a_run(run, kind, value):
    _, module = run(kind, value)
    assert module.net[0].out_features == 12
    assert fissile.nonzeros(module).weights == 6 * 8 + 3 * 6
    assert module.rates == [0.01 / 2**epoch for epoch in range(EPOCHS) for _ in range(3)]


@pytest.mark.parametrize(("kind", "value"), MOMENTS)
@pytest.mark.parametrize("epoch", range(EPOCHS - 1))
def test_resumed_run_is_the_uninterrupted_run(run, tmp_path, kind, value, epoch):
    folder, whole = run(kind, value)
    module, when = Net(seed=5), ExpandAt(2, **{kind: value})
    checkpoint = folder / f"epoch={epoch}.ckpt"
    fit(tmp_path, module, when, ckpt_path=checkpoint)
    assert len(module.rates) == 3 * (EPOCHS - 1 - epoch)
    assert same(module, whole)


def test_moments_are_carried_across(tmp_path):
    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            state = trainer.optimizers[0].state
            self.moments = {
                name: copy.deepcopy(state.get(p)) for name, p in module.named_parameters()
            }

    before, after = Look(), Look()
    module = Net()
    fit(tmp_path, module, before, ExpandAt(2, step=4), after, max_steps=5)
    old, new = before.moments["net.0.weight"], after.moments["net.0.weight"]
    removed = module.net[0].owner < 0
    assert old["step"] == new["step"] == 4
    assert torch.equal(new["exp_avg"], torch.where(removed, 0, old["exp_avg"]))
    assert removed.any()
    assert old["exp_avg"].any()


def test_equals_expanding_by_hand(tmp_path):
    module, mine = Net(), Net()
    fit(tmp_path, module, ExpandAt(2, split="gram", epoch=1, seed=3), max_epochs=2)
    adam = torch.optim.AdamW(mine.parameters(), lr=0.01, weight_decay=0.1)
    for epoch in range(2):
        if epoch == 1:
            fissile.expand(mine, 2, "gram", seed=3, optimizer=adam, inplace=True)
            adam.param_groups[0]["lr"] = 0.005
        for batch in loader():
            adam.zero_grad()
            mine.loss(batch).backward()
            adam.step()
    assert same(module, mine)


def test_logs_what_the_expansion_came_to(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(tmp_path, Net(), ExpandAt(2, step=2), logger=logger, max_steps=4)
    with open(tmp_path / "lightning_logs/version_0/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["fissile/neurons"]]
    assert [(row["step"], float(row["fissile/neurons"])) for row in rows] == [("2", 12.0)]
    assert float(rows[0]["fissile/nonzeros"]) == 66
    assert 0 < float(rows[0]["fissile/density/net.0"]) < 1


def test_waits_for_a_whole_step_of_accumulated_gradients(tmp_path):
    class Look(pl.Callback):
        def __init__(self):
            self.batches = []

        def on_train_batch_start(self, trainer, module, batch, index):
            self.batches.append(module.net[0].out_features)

    look = Look()
    when = ExpandAt(2, step=1)
    fit(tmp_path, Net(), when, look, max_epochs=2, accumulate_grad_batches=2)
    assert look.batches == [6, 6, 12, 12, 12, 12]


def test_a_callback_serves_a_second_run(tmp_path):
    when = ExpandAt(2, epoch=1)
    for _ in range(2):
        module = Net()
        fit(tmp_path, module, when, max_epochs=2)
        assert module.net[0].out_features == 12


def test_training_goes_on_when_the_module_is_expanded_already(tmp_path):
    when, module = ExpandAt(2, epoch=0), Net()
    fit(tmp_path, module, when, max_epochs=1)
    before = copy.deepcopy(module.net)
    fit(tmp_path, module, when, max_epochs=1)
    assert module.net[0].out_features == 12
    assert not same(before, module.net)


def test_a_fitted_module_can_be_copied(tmp_path):
    module = Net()
    fit(tmp_path, module, ExpandAt(2, epoch=0), max_epochs=1)
    module.trainer = None
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert same(copied, module)
        assert copied.on_save_checkpoint.args == (copied,)


class Two(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.net.parameters(), lr=0.01),
            torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9),
        ]

    def training_step(self, batch, index):
        x, y = batch
        for net, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(net(x), y))
            optimizer.step()


def test_two_optimizers_go_on(tmp_path):
    whole, module = Two(), Two()
    fit(tmp_path, whole, every_epoch(tmp_path), ExpandAt(2, epoch=1), max_epochs=3)
    assert (whole.net[0].out_features, whole.other[0].out_features) == (12, 8)
    adam, sgd = whole.trainer.optimizers
    assert {id(p) for p in adam.state} == {id(p) for p in whole.net.parameters()}
    assert {id(p) for p in sgd.state} == {id(p) for p in whole.other.parameters()}
    assert all(state["step"] == 9 for state in adam.state.values())
    for epoch in range(2):
        module = Two()
        fit(
            tmp_path,
            module,
            ExpandAt(2, epoch=1),
            max_epochs=3,
            ckpt_path=tmp_path / f"epoch={epoch}.ckpt",
        )
        assert same(module, whole)


def test_refuses_two_optimizers_of_one_parameter(tmp_path):
    class Shared(Two):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(FissileError, match="two optimizers hold the same parameter"):
        fit(tmp_path, Shared(), ExpandAt(2, epoch=3))


def test_two_expansions_in_one_run(tmp_path):
    steps = [ExpandAt(2, epoch=1, where="net.0"), ExpandAt(4, epoch=2, where="other.0")]
    whole = Two()
    fit(tmp_path, whole, every_epoch(tmp_path), *steps, max_epochs=4)
    assert (whole.net[0].out_features, whole.other[0].out_features) == (12, 16)
    for epoch in range(3):
        steps = [ExpandAt(2, epoch=1, where="net.0"), ExpandAt(4, epoch=2, where="other.0")]
        module = Two()
        fit(tmp_path, module, *steps, max_epochs=4, ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        assert same(module, whole)


def test_refuses_an_optimizer_before_the_first_step(tmp_path):
    class Other(Net):
        def configure_optimizers(self):
            return torch.optim.Rprop(self.parameters())

    module = Other()
    with pytest.raises(FissileError, match="Rprop"):
        fit(tmp_path, module, ExpandAt(2, epoch=3))
    assert not module.rates


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (DDPStrategy(start_method="spawn", process_group_backend="gloo"), 'strategy="ddp"'),
        (FSDPStrategy(process_group_backend="gloo"), "under FSDPStrategy"),
    ],
)
def test_refuses_strategies(strategy, message):
    callback = ExpandAt(2, epoch=1)

    class Fake:
        pass

    fake = Fake()
    fake.strategy = strategy
    with pytest.raises(FissileError, match=message):
        callback.setup(fake, Net(), "fit")


def test_refuses_a_module_without_a_place_before_the_first_step(tmp_path):
    module = Net()
    module.net = nn.Linear(8, 3)
    with pytest.raises(FissileError, match="nothing to expand"):
        fit(tmp_path, module, ExpandAt(2, epoch=3))
    module = Net()
    with pytest.raises(FissileError, match="encoder"):
        fit(tmp_path, module, ExpandAt(2, epoch=3, where="encoder.*"))
    with pytest.raises(FissileError, match="alpha=9 is larger than the fan-in of 8"):
        fit(tmp_path, module, ExpandAt(9, epoch=3))
    assert not module.rates


@pytest.mark.parametrize(
    ("when", "settings", "message"),
    [
        ({"epoch": 2}, {"max_epochs": 2}, "training ends before epoch 2 begins .max_epochs=2"),
        ({"step": 5}, {"max_steps": 5, "max_epochs": -1}, "before step 5 begins .*max_steps=5"),
    ],
)
def test_refuses_a_run_that_is_too_short(tmp_path, when, settings, message):
    module = Net()
    with pytest.raises(FissileError, match=message):
        fit(tmp_path, module, ExpandAt(2, **when), **settings)
    assert not module.rates


@pytest.mark.parametrize(
    ("when", "settings", "message"),
    [
        ({"epoch": 3}, {"fast_dev_run": True}, "ended under fast_dev_run before epoch 3"),
        ({"epoch": 3}, {"max_steps": 5}, "ended before epoch 3"),
        ({"step": 5}, {"max_epochs": 1}, "ended before step 5"),
    ],
)
def test_says_when_a_run_ended_before_its_expansion(tmp_path, when, settings, message):
    module = Net()
    with pytest.warns(UserWarning, match=message):
        fit(tmp_path, module, ExpandAt(2, **when), **settings)
    assert module.net[0].out_features == 6
    assert module.rates


class Averaged(WeightAveraging):
    pass


@pytest.mark.parametrize("other", [StochasticWeightAveraging(0.1), Averaged()])
def test_refuses_to_average_across_the_expansion(tmp_path, other):
    module = Net()
    with pytest.raises(FissileError, match=f"{type(other).__name__} averages weights"):
        fit(tmp_path, module, other, ExpandAt(2, epoch=1))
    assert not module.rates


def test_works_with_either_lightning(monkeypatch):
    both = ModuleType("lightning"), ModuleType("lightning.pytorch")
    for module in both:
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    both[1].Callback = type("Callback", (), {})
    assert integration._callbacks() == (both[1].Callback, pl.Callback)
    monkeypatch.delitem(sys.modules, "lightning")
    assert integration._callbacks() == (pl.Callback,)
    assert isinstance(ExpandAt(2, epoch=1), pl.Callback)
