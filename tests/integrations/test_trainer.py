from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import fissile
from fissile.layers import Partitioned

pytest.importorskip("transformers")

from language_models import WORDS, bert, expanded_layers, gpt2, llama, seeded
from networks import same
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback

from fissile.integrations.transformers import ExpandAt


def shallow():
    return seeded(num_hidden_layers=1)


def samples():
    rows = torch.randint(1, WORDS, (16, 7), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": int(row[0] > WORDS // 2)} for row in rows]


class Stream(IterableDataset):
    """The same samples, without a length."""

    def __iter__(self):
        return iter(samples())


def trainer(model, folder, *callbacks, data=None, **settings):
    """Sixteen samples in batches of four, three epochs: twelve steps."""
    saves = "steps" if "save_steps" in settings else "no"
    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=3,
        save_strategy=saves,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    data = samples() if data is None else data
    return Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


def trained(folder, *callbacks, make=bert, **settings):
    model = seeded(make)
    run = trainer(model, folder, *callbacks, **settings)
    run.train()
    return run


def resumed(checkpoint, folder, *callbacks, **settings):
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    run = trainer(model, folder, *callbacks, **settings)
    run.train(resume_from_checkpoint=str(checkpoint))
    return run


class Watch(TrainerCallback):
    """Notes what the optimizer holds when a step begins, before or after the split."""

    def __init__(self, step):
        self.step = step
        self.seen = {}

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
        if state.global_step == self.step:
            held = optimizer.optimizer.state
            self.seen = {
                name: {key: value.clone() for key, value in held[p].items()}
                for name, p in model.named_parameters()
            }


@pytest.mark.parametrize(("when", "step"), [({"step": 5}, 5), ({"epoch": 1}, 4)])
def test_training_goes_on_and_checkpoints_resume_on_either_side(when, step, tmp_path):
    run = trained(tmp_path / "whole", ExpandAt(2, **when), save_steps=4)
    dense = fissile.nonzeros(seeded()).weights
    assert fissile.nonzeros(run.model).weights == dense
    (event,) = [log for log in run.state.log_history if "fissile/nonzeros" in log]
    assert event["step"] == step
    assert event["fissile/nonzeros"] == dense
    assert event["fissile/neurons"] == 2 * 2 * 24
    rates = [log["learning_rate"] for log in run.state.log_history if "loss" in log]
    assert rates == pytest.approx([1e-2 * (1 - k / 12) for k in range(12)])
    # Dropout and shuffling are on: the state of the generators has to come back as well.
    for number in (4, 8):
        checkpoint = tmp_path / "whole" / f"checkpoint-{number}"
        again = resumed(checkpoint, tmp_path / "again", ExpandAt(2, **when), save_steps=4)
        assert same(again.model, run.model), number


def test_the_optimizer_is_carried_across(tmp_path):
    before, after = Watch(5), Watch(5)
    run = trained(tmp_path, before, ExpandAt(2, step=5), after)
    name, layer = next(
        (name, m) for name, m in run.model.named_modules() if isinstance(m, Partitioned)
    )
    for key in ("exp_avg", "exp_avg_sq"):
        old, new = (watch.seen[f"{name}.weight"][key] for watch in (before, after))
        assert old.abs().sum() > 0
        assert torch.equal(new, torch.where(layer.owner < 0, 0, old))
        old, new = (watch.seen[f"{name}.bias"][key] for watch in (before, after))
        assert torch.equal(new, old.repeat_interleave(2))
    assert {float(held["step"]) for held in after.seen.values()} == {5}
    held = run.optimizer.optimizer.state
    assert {id(p) for p in run.model.parameters()} == {id(p) for p in held}
    assert {float(held[p]["step"]) for p in run.model.parameters()} == {12}


@pytest.mark.parametrize("make", [gpt2, llama])
def test_language_models_go_on_too(make, tmp_path):
    model = seeded(make)
    dense = fissile.nonzeros(model).weights
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in samples()]
    run = trainer(model, tmp_path, ExpandAt(2, step=6), data=data, save_steps=8)
    run.train()
    losses = [log["loss"] for log in run.state.log_history if "loss" in log]
    assert losses[-1] < losses[6] < losses[0]
    assert fissile.nonzeros(model).weights == dense
    again = trainer(
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-8"),
        tmp_path / "again",
        ExpandAt(2, step=6),
        data=data,
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert same(again.model, model)


def test_the_best_model_is_the_best_after_the_split(tmp_path):
    better_at_first = iter(range(100))
    run = trainer(
        seeded(),
        tmp_path,
        ExpandAt(2, step=5),
        load_best_model_at_end=True,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="rising",
        greater_is_better=False,
    )
    run.compute_metrics = lambda _: {"rising": next(better_at_first)}
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    best = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-6")
    assert same(run.model, best)


def test_a_model_of_ones_own_is_expanded_in_the_trainer(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 2))

        def forward(self, input_ids, labels):
            scores = self.mlp(input_ids / WORDS)
            return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}

    run = trained(tmp_path, ExpandAt(2, step=5), make=Own)
    assert len(expanded_layers(run.model)) == 2
    assert fissile.nonzeros(run.model).weights == 7 * 6 + 6 * 2


# Refusals


@pytest.mark.parametrize(
    ("callback", "settings", "message"),
    [
        (ExpandAt(2, step=12), {}, "training ends before step 12"),
        (ExpandAt(2, epoch=3), {}, "training ends before epoch 3"),
        (ExpandAt(2, step=5), {"optim": "adafactor"}, "Adafactor .* optim="),
        (ExpandAt(2, step=0, where="no.such.*"), {}, "no.such"),
    ],
)
def test_runs_that_cannot_work(callback, settings, message, tmp_path):
    with pytest.raises(fissile.FissileError, match=message):
        trained(tmp_path, callback, **settings)


def test_nothing_is_expanded_twice(tmp_path):
    wide = fissile.expand(seeded(), 2)
    run = trainer(wide, tmp_path, ExpandAt(2, step=5))
    with pytest.raises(fissile.FissileError, match="expanded already"):
        run.train()


def test_a_split_that_was_missed_is_noticed(tmp_path):
    trained(tmp_path, max_steps=6, save_steps=6)
    with pytest.raises(fissile.FissileError, match="step 3 is over"):
        resumed(tmp_path / "checkpoint-6", tmp_path / "again", ExpandAt(2, step=3))


@pytest.mark.parametrize("settings", [{"world_size": 2}, {"n_gpu": 2}, {"fsdp": "full_shard"}])
def test_several_processes_are_refused(settings):
    args = {"world_size": 1, "n_gpu": 0, "fsdp": None, "deepspeed": None} | settings
    state = SimpleNamespace(epoch=0, global_step=0, max_steps=9)
    with pytest.raises(fissile.FissileError, match=r"before making the Trainer"):
        ExpandAt(2, step=1).on_train_begin(
            SimpleNamespace(**args), state, None, model=nn.Linear(2, 2), optimizer=None
        )


def test_epochs_are_refused_where_nobody_counts_them(tmp_path):
    model = shallow()
    run = trainer(model, tmp_path, ExpandAt(2, epoch=1), data=Stream(), max_steps=12)
    with pytest.raises(fissile.FissileError, match=r"no length.*ExpandAt\(step="):
        run.train()
    assert run.state.global_step == 0


def test_steps_are_counted_without_a_length(tmp_path):
    run = trainer(shallow(), tmp_path, ExpandAt(2, step=5), data=Stream(), max_steps=6)
    run.train()
    (event,) = [log for log in run.state.log_history if "fissile/neurons" in log]
    assert event["step"] == 5
    assert expanded_layers(run.model)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (ExpandAt(64, step=9), "layer 'bert.*': alpha=64 is larger than the fan-in of 16"),
        (ExpandAt(2, step=9, where="nope"), "where='nope' matches no place"),
        (ExpandAt(2, epoch=2, where=lambda place: False), "where chose none"),
    ],
)
def test_mistakes_are_told_before_the_first_step(callback, message, tmp_path):
    run = trainer(shallow(), tmp_path, callback)
    with pytest.raises(fissile.FissileError, match=message):
        run.train()
    assert run.state.global_step == 0


class Backwards(nn.Module):
    """The layer that reads is registered before the layer that makes."""

    def __init__(self):
        super().__init__()
        self.fc2 = nn.Linear(6, 2)
        self.fc1 = nn.Linear(7, 6)

    def forward(self, input_ids, labels):
        scores = self.fc2(torch.relu(self.fc1(input_ids / WORDS)))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def test_layers_in_any_order_are_counted(tmp_path):
    run = trainer(Backwards(), tmp_path, ExpandAt(2, step=1), max_steps=2)
    run.train()
    (event,) = [log for log in run.state.log_history if "fissile/nonzeros" in log]
    assert event["fissile/neurons"] == 12
    assert event["fissile/nonzeros"] == 7 * 6 + 6 * 2


def test_tensorboard_hears_of_the_split(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    run = trainer(shallow(), tmp_path, ExpandAt(2, step=1), TensorBoardCallback(), max_steps=3)
    run.train()
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    (neurons,) = events.Scalars("train/fissile/neurons")
    assert (neurons.step, neurons.value) == (2, 48)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A run with a checkpoint from before the split and one from after it."""
    folder = tmp_path_factory.mktemp("run")
    trainer(shallow(), folder, ExpandAt(2, step=3), save_steps=2, max_steps=4).train()
    return folder


@pytest.mark.parametrize("checkpoint", [True, "checkpoint-4"])
def test_a_dense_model_does_not_resume_an_expanded_run(checkpoints, checkpoint):
    run = trainer(shallow(), checkpoints, ExpandAt(2, step=3), max_steps=6)
    where = checkpoint if checkpoint is True else str(checkpoints / checkpoint)
    with pytest.raises(fissile.FissileError, match=r"other side of the split.*from_pretrained"):
        run.train(resume_from_checkpoint=where)


def test_an_expanded_model_does_not_resume_a_dense_run(checkpoints):
    wide = BertForSequenceClassification.from_pretrained(checkpoints / "checkpoint-4")
    run = trainer(wide, checkpoints, ExpandAt(2, step=3), max_steps=6)
    with pytest.raises(fissile.FissileError, match=r"other side of the split.*from_pretrained"):
        run.train(resume_from_checkpoint=str(checkpoints / "checkpoint-2"))


def test_the_right_model_resumes_and_is_watched_no_longer(checkpoints):
    wide = BertForSequenceClassification.from_pretrained(checkpoints / "checkpoint-4")
    run = trainer(wide, checkpoints, ExpandAt(2, step=3), max_steps=5)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 5
    assert not wide._load_state_dict_pre_hooks
