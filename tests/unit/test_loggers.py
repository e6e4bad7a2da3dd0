import copy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import fissile
from fissile._common.errors import FissileError
from fissile.integrations.loggers import Logger, MLflow, Several, TensorBoard, WandB, describe
from fissile.layers import (
    MaskedConv2d,
    MaskedLinear,
    Pair,
    PartitionedConv2d,
    PartitionedLinear,
)


class Memory:
    def __init__(self):
        self.seen, self.closed = [], False

    def log(self, step, /, **numbers):
        self.seen.append((step, numbers))

    def close(self):
        self.closed = True


def partitioned(*rows):
    owner = torch.tensor(rows)
    return PartitionedLinear(torch.ones(owner.shape), owner, alpha=2)


def masked(*rows):
    mask = torch.tensor(rows).bool()
    return MaskedLinear(torch.ones(mask.shape), mask)


def paired(second, *firsts):
    second.pair = Pair(firsts[:-1], (), firsts[-1])
    return second


def test_tensorboard_can_be_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoard(tmp_path / "runs")
    logger.log(1, loss=0.5, **{"density/layers.0": 0.25})
    logger.log(2, loss=torch.tensor(0.75))
    logger.close()
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["density/layers.0", "loss"]
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(1, 0.5), (2, 0.75)]
    assert [one.value for one in events.Scalars("density/layers.0")] == [0.25]


def test_several_pass_everything_on():
    one, other = Memory(), Memory()
    both = Several(one, other)
    both.log(3, loss=1.0, step=7.0)
    both.close()
    assert one.seen == other.seen == [(3, {"loss": 1.0, "step": 7.0})]
    assert one.closed
    assert other.closed


def test_several_are_closed_even_if_one_fails():
    class Failing(Memory):
        def close(self):
            super().close()
            raise OSError("the disk is full")

    loggers = Memory(), Failing(), Memory(), Failing()
    with pytest.raises(OSError, match="the disk is full"):
        Several(*loggers).close()
    assert all(logger.closed for logger in loggers)


def test_what_is_no_logger_is_refused():
    with pytest.raises(FissileError, match=r"needs log\(step"):
        Several(Memory(), object())


def test_loggers_are_loggers(tmp_path):
    logger = TensorBoard(tmp_path)
    logger.close()
    assert all(isinstance(one, Logger) for one in (logger, Several(), Memory()))
    assert not isinstance(print, Logger)


@pytest.mark.parametrize(
    ("kind", "package"), [(WandB, "wandb"), (MLflow, "mlflow"), (TensorBoard, "tensorboard")]
)
def test_a_missing_package_is_named(monkeypatch, kind, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FissileError, match=f"this needs {package}: pip install"):
        kind() if kind is not TensorBoard else kind("runs")


def stand_in(monkeypatch, name, **functions):
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def test_wandb_is_called_as_documented(monkeypatch):
    calls = []
    run = SimpleNamespace(
        log=lambda numbers, step: calls.append(("log", numbers, step)),
        finish=lambda: calls.append("finish"),
    )
    stand_in(monkeypatch, "wandb", init=lambda **settings: calls.append(settings) or run)
    logger = WandB(project="fissile", mode="offline")
    logger.log(4, loss=torch.tensor(0.5))
    logger.close()
    assert calls == [
        {"project": "fissile", "mode": "offline"},
        ("log", {"loss": 0.5}, 4),
        "finish",
    ]


def test_mlflow_is_called_as_documented(monkeypatch):
    calls = []
    run = SimpleNamespace(info=SimpleNamespace(run_id="abc"))
    stand_in(
        monkeypatch,
        "mlflow",
        start_run=lambda **settings: calls.append(settings) or run,
        log_metrics=lambda numbers, step, run_id: calls.append((numbers, step, run_id)),
        active_run=lambda: run,
        end_run=lambda: calls.append("end"),
    )
    logger = MLflow(run_name="wide")
    logger.log(4, loss=torch.tensor(0.5))
    logger.close()
    assert calls == [{"run_name": "wide"}, ({"loss": 0.5}, 4, "abc"), "end"]


@pytest.mark.parametrize("active", [None, SimpleNamespace(info=SimpleNamespace(run_id="other"))])
def test_mlflow_ends_its_own_run_only(monkeypatch, active):
    ended = []
    stand_in(
        monkeypatch,
        "mlflow",
        start_run=lambda: SimpleNamespace(info=SimpleNamespace(run_id="abc")),
        active_run=lambda: active,
        end_run=lambda: ended.append("the active one"),
        MlflowClient=lambda: SimpleNamespace(set_terminated=ended.append),
    )
    MLflow().close()
    assert ended == ["abc"]


def test_wandb_itself(tmp_path):
    pytest.importorskip("wandb")
    logger = WandB(project="fissile", mode="offline", dir=str(tmp_path))
    logger.log(0, loss=0.5)
    logger.close()
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.filterwarnings("ignore")  # its database speaks of its own deprecations
def test_mlflow_itself(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    logger = MLflow(run_name="wide")
    logger.log(3, loss=0.5)
    logger.close()
    (run,) = mlflow.search_runs(output_format="list")
    assert run.data.metrics == {"loss": 0.5}


def test_describe_an_expanded_network():
    wide = fissile.expand(fissile.MLP([32, 8, 8, 8, 10]), 4)
    there = {i: wide.layers[i].dense_weight() != 0 for i in (0, 2, 4, 6)}
    alive = [there[0].any(1) & there[2].any(0), there[4].any(1) & there[6].any(0)]
    dead = 64 - sum(int(children.sum()) for children in alive)
    assert dead > 0
    assert describe(wide) == {
        "nonzeros": 32 * 8 + 8 * 8 + 8 * 8 + 8 * 10,
        "neurons": 64,
        "dead": dead / 64,
    } | {f"density/layers.{i}": int(rows.sum()) / rows.numel() for i, rows in there.items()}


def test_describe_a_dense_network():
    assert describe(fissile.MLP([32, 8, 1])) == {"nonzeros": 264}


def test_children_without_inputs_or_outputs_are_dead():
    # Children: 0 is whole, 1 has no output, 2 has neither, 3 has no input.
    first = partitioned([0, 1, 1], [-1, -1, -1])
    second = masked([1, 0, 0, 1], [1, 0, 0, 0])
    found = describe(nn.Sequential(first, nn.ReLU(), paired(second, "0", "2")))
    assert found["neurons"] == 4
    assert found["dead"] == 0.75
    assert found["density/0"] == 3 / 12
    assert found["density/2"] == 3 / 8


def test_a_gated_child_lives_through_gate_or_up():
    gate, up = partitioned([0, 0, -1]), partitioned([-1, 1, -1])
    down = paired(masked([1, 1]), "gate", "up", "down")
    model = nn.ModuleDict({"gate": gate, "up": up, "down": down})
    assert describe(model)["neurons"] == 2
    assert describe(model)["dead"] == 0
    model["up"] = partitioned([-1, -1, -1])
    assert describe(model)["dead"] == 0.5


def test_halves_of_one_layer_make_one_child():
    fused = partitioned([0, 0, 0], [0, 0, 1])  # gates of two children, then their ups
    model = nn.Sequential(fused, paired(masked([1, 1]), "0", "1"))
    assert describe(model)["neurons"] == 2
    assert describe(model)["dead"] == 0


def test_filters_are_children_too():
    owner = torch.zeros(1, 2, 3, 3, dtype=torch.int8)
    owner[0, 1] = 1
    mask = torch.zeros(3, 2, 3, 3, dtype=torch.bool)
    mask[2, 0, 1, 1] = True  # one weight of the whole kernel reads the first child
    first = PartitionedConv2d(torch.ones(1, 2, 3, 3), owner, 2)
    second = paired(MaskedConv2d(torch.ones(3, 2, 3, 3), mask), "0", "2")
    found = describe(nn.Sequential(first, nn.ReLU(), second))
    assert (found["neurons"], found["dead"]) == (2, 0.5)
    assert found["density/2"] == 1 / 54


class Crossed(nn.Module):
    """Two pairs of layers of equal widths, registered in an order that is not that of the data."""

    def __init__(self, *order):
        super().__init__()
        layers = {"a": (8, 6), "b": (6, 6), "c": (6, 6), "d": (6, 3)}
        for name in order:
            self.add_module(name, nn.Linear(*layers[name]))

    def forward(self, x):
        x = self.b(torch.relu(self.a(x)))
        return self.d(torch.relu(self.c(torch.tanh(x))))


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


@pytest.mark.parametrize("split", ["random", "overlapping"])
@pytest.mark.parametrize(
    "model", [Crossed("a", "c", "b", "d"), Crossed("d", "c", "b", "a"), Lists()]
)
def test_the_order_in_which_layers_are_registered_does_not_matter(model, split):
    wide = fissile.expand(model, 2, split)
    for one in (wide, fissile.to_masked(wide), copy.deepcopy(wide)):
        found = describe(one)
        assert found["neurons"] == 2 * 6 + 2 * 6
        assert 0 <= found["dead"] < 0.5


def test_layers_of_which_the_pairs_are_not_known_are_not_guessed_at():
    found = describe(nn.Sequential(partitioned([0, 1, 1]), masked([1, 1])))
    assert found == {"nonzeros": 5, "density/0": 0.5, "density/1": 1.0}
