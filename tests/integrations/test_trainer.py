import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import fissile
from fissile.layers import SparseLayer

pytest.importorskip("transformers")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.integrations import TensorBoardCallback

from fissile.integrations.transformers import ExpandAt

WORDS = 40


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=WORDS, intermediate_size=24, **sizes)
    return BertForSequenceClassification(config)


def samples():
    rows = torch.randint(1, WORDS, (16, 7), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": int(row[0] > WORDS // 2)} for row in rows]


class Stream(IterableDataset):
    """The same samples, without a length."""

    def __iter__(self):
        return iter(samples())


def trainer(model, folder, *callbacks, data=None, **settings):
    """Sixteen samples in batches of four, three epochs: twelve steps."""
    chosen = {"save_strategy": "no", "num_train_epochs": 3} | settings
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **chosen,
    )
    data = samples() if data is None else data
    return Trainer(model, args, train_dataset=data, callbacks=list(callbacks))


def is_expanded(model):
    return any(isinstance(module, SparseLayer) for module in model.modules())


def test_epochs_are_refused_where_nobody_counts_them(tmp_path):
    model = bert()
    run = trainer(model, tmp_path, ExpandAt(2, epoch=1), data=Stream(), max_steps=12)
    with pytest.raises(fissile.FissileError, match=r"no length.*ExpandAt\(step="):
        run.train()
    assert run.state.global_step == 0


def test_steps_are_counted_without_a_length(tmp_path):
    run = trainer(bert(), tmp_path, ExpandAt(2, step=5), data=Stream(), max_steps=6)
    run.train()
    (event,) = [log for log in run.state.log_history if "fissile/neurons" in log]
    assert event["step"] == 5
    assert is_expanded(run.model)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (ExpandAt(64, step=9), "layer 'bert.*': alpha=64 is larger than the fan-in of 16"),
        (ExpandAt(2, step=9, where="nope"), "where='nope' matches no place"),
        (ExpandAt(2, epoch=2, where=lambda place: False), "where chose none"),
    ],
)
def test_mistakes_are_told_before_the_first_step(callback, message, tmp_path):
    run = trainer(bert(), tmp_path, callback)
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
    run = trainer(bert(), tmp_path, ExpandAt(2, step=1), TensorBoardCallback(), max_steps=3)
    run.train()
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    (neurons,) = events.Scalars("train/fissile/neurons")
    assert (neurons.step, neurons.value) == (2, 48)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A run with a checkpoint from before the split and one from after it."""
    folder = tmp_path_factory.mktemp("run")
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer(bert(), folder, ExpandAt(2, step=3), **settings).train()
    return folder


@pytest.mark.parametrize("checkpoint", [True, "checkpoint-4"])
def test_a_dense_model_does_not_resume_an_expanded_run(checkpoints, checkpoint):
    run = trainer(bert(), checkpoints, ExpandAt(2, step=3), max_steps=6)
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
