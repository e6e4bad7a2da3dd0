import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fissile
from fissile.layers import Partitioned, SparseLayer

pytest.importorskip("transformers")

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from fissile.integrations.transformers import ExpandAt

WORDS = 40


def bert(**other):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=WORDS, intermediate_size=24, **sizes, **other)
    return BertForSequenceClassification(config)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2))


def llama():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, intermediate_size=24, **sizes))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=WORDS, d_ff=24, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config)


MODELS = {
    "bert": (bert, AutoModelForSequenceClassification),
    "gpt2": (gpt2, AutoModelForCausalLM),
    "llama": (llama, AutoModelForCausalLM),
    "t5": (t5, AutoModelForSeq2SeqLM),
}


def seeded(make=bert, **other):
    torch.manual_seed(0)
    return make(**other).eval()


def ids(rows=3):
    return torch.randint(1, WORDS, (rows, 7), generator=torch.Generator().manual_seed(1))


def logits(model):
    more = {"decoder_input_ids": ids()} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=ids(), **more).logits


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def expanded_layers(model):
    return {name: type(m) for name, m in model.named_modules() if isinstance(m, SparseLayer)}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """An expanded BERT and the folder it was saved to; tests work on copies."""
    folder = tmp_path_factory.mktemp("wide")
    wide = fissile.expand(seeded(), 2)
    wide.save_pretrained(folder)
    return wide, folder


@pytest.fixture
def wide(original):
    return copy.deepcopy(original[0])


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original[1], tmp_path / "copy")


# Files


@pytest.mark.parametrize("name", MODELS)
def test_an_expanded_model_comes_back_as_it_was(name, tmp_path):
    make, auto = MODELS[name]
    dense = seeded(make)
    wide = fissile.expand(dense, 2)
    wide.save_pretrained(tmp_path)
    back = auto.from_pretrained(tmp_path)
    assert torch.equal(logits(back), logits(wide))
    assert expanded_layers(back) == expanded_layers(wide) != {}
    assert same(back, wide)
    assert fissile.nonzeros(back).weights == fissile.nonzeros(dense).weights
    # Tensors that lie askew in memory round differently, and a run would not resume exactly.
    assert all(p.requires_grad and p.data_ptr() % 64 == 0 for p in back.parameters())
    assert back.config.to_dict() == wide.config.to_dict() | {"_name_or_path": str(tmp_path)}


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_model_of_which_some_layers_are_expanded_comes_back(name, tmp_path):
    make, auto = MODELS[name]
    wide = fissile.expand(seeded(make), 2, where="*.layer*.1.*")
    assert 0 < len(expanded_layers(wide)) < len(expanded_layers(fissile.expand(seeded(make), 2)))
    wide.save_pretrained(tmp_path)
    assert torch.equal(logits(auto.from_pretrained(tmp_path)), logits(wide))


@pytest.mark.parametrize(
    "other", [lambda wide: fissile.to_masked(wide), lambda _: fissile.dropconnect(seeded(), 2)]
)
def test_other_layers_come_back_too(other, wide, tmp_path):
    model = other(wide)
    model.save_pretrained(tmp_path)
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert same(back, model)
    assert expanded_layers(back) == expanded_layers(model) != expanded_layers(wide)


def test_a_degree_that_cannot_be_is_refused(tmp_path):
    fissile.dropconnect(seeded(), 2).save_pretrained(tmp_path)
    with_tensor(tmp_path, "degree", lambda degree: degree + 99)
    with pytest.raises(fissile.FileError, match="degree"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_what_was_loaded_can_be_saved_and_cast(wide, folder, tmp_path):
    back = AutoModelForSequenceClassification.from_pretrained(folder)
    back.save_pretrained(tmp_path / "second", max_shard_size="8KB")
    assert len(list((tmp_path / "second").glob("*.safetensors"))) > 1
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "second")
    assert same(again, wide)
    assert {p.dtype for p in again.half().parameters()} == {torch.float16}
    assert any(b.dtype == torch.int8 for b in again.buffers())


def test_the_type_asked_for_is_that_of_the_weights_only(folder):
    back = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in back.parameters()} == {torch.bfloat16}
    kinds = {b.dtype for m in back.modules() if isinstance(m, SparseLayer) for b in m.buffers()}
    assert kinds == {torch.int8, torch.bool}
    assert logits(back).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")
def test_layers_may_be_offloaded(wide, folder, tmp_path):
    layers = {"bert.encoder.layer.0": "disk", "bert.encoder.layer.1": "cpu"}
    places = layers | dict.fromkeys(("bert.embeddings", "bert.pooler", "classifier"), "cpu")
    back = AutoModelForSequenceClassification.from_pretrained(
        folder, device_map=places, offload_folder=tmp_path / "disk"
    )
    assert torch.equal(logits(back), logits(wide))


def test_the_body_comes_back_without_its_head(wide, folder):
    body = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        here, there = (m.eval()(ids()).last_hidden_state for m in (body, wide.bert))
    assert isinstance(body, BertModel)
    assert torch.equal(here, there)


def test_the_body_comes_back_under_a_new_head(tmp_path):
    body = fissile.expand(seeded().bert, 2)
    body.save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    assert same(model.bert, body)
    assert logits(model).shape == (3, 5)


def test_a_body_expanded_in_place_comes_back_in_its_model(tmp_path):
    model = seeded()
    fissile.expand(model.bert, 2, inplace=True)
    assert model.config.intermediate_size == 48
    model.save_pretrained(tmp_path)
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(back), logits(model))
    assert expanded_layers(back) == expanded_layers(model) != {}


def test_the_configs_of_both_stacks_learn_the_width():
    wide = fissile.expand(seeded(t5), 2)
    stacks = (wide, wide.encoder, wide.decoder)
    assert [stack.config.d_ff for stack in stacks] == [48] * 3


def test_only_the_width_that_changed_is_noted():
    config = BartConfig(
        vocab_size=WORDS, d_model=16, decoder_layers=1, encoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=16,
    )  # fmt: skip
    wide = fissile.expand(BartForCausalLM(config), 2)
    assert (wide.config.decoder_ffn_dim, wide.config.encoder_ffn_dim) == (48, 24)


def test_written_out_it_needs_no_fissile(wide, folder, tmp_path, monkeypatch):
    plain = fissile.to_dense(wide)
    plain.save_pretrained(tmp_path / "plain")
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "fissile")
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    assert not hasattr(back.config, "quantization_config")
    assert torch.equal(logits(back), logits(plain))
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):
        AutoModelForSequenceClassification.from_pretrained(folder)


def test_a_quantised_model_keeps_its_own_config(wide):
    other = {"quant_method": "gptq"}
    wide.config.quantization_config = other
    assert fissile.to_masked(wide).config.quantization_config == other
    assert fissile.to_dense(wide).config.quantization_config == other


# Torn and hostile files


def with_recipe(folder, change):
    """Change the recipe in a saved model's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = change(config["quantization_config"])
    path.write_text(json.dumps(config))


def first_layer(entry, **changes):
    layers = entry["recipe"]["layers"]
    name = next(name for name, layer in layers.items() if layer["kind"] == "partitioned")
    layers[name] |= changes
    return entry


def half(entry):
    """Take one layer of a pair out."""
    entry["recipe"]["layers"].popitem()
    return entry


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: {"quant_method": "fissile"},
        lambda entry: entry | {"recipe": [1, 2]},
        lambda entry: entry | {"recipe": {"layers": "all"}},
        lambda entry: entry | {"recipe": {"layers": {"no.such.layer": {"kind": "masked"}}}},
        lambda entry: entry | {"recipe": entry["recipe"] | {"layers": {"": {"kind": "masked"}}}},
        lambda entry: entry | {"recipe": entry["recipe"] | {"norms": [1]}},
        lambda entry: entry | {"recipe": entry["recipe"] | {"pairs": "all"}},
        lambda entry: entry | {"recipe": entry["recipe"] | {"pairs": []}},
        lambda entry: half(entry),
        lambda entry: first_layer(entry, kind="pickled"),
        lambda entry: first_layer(entry, kind=["masked"]),
        lambda entry: first_layer(entry, inputs=10**15),
        lambda entry: first_layer(entry, alpha=3),
        lambda entry: first_layer(entry, alpha=-2),
        lambda entry: first_layer(entry, alpha=10**15),
        lambda entry: first_layer(entry, alpha="two"),
        lambda entry: first_layer(entry, alpha=None),
    ],
)
def test_a_recipe_that_does_not_fit_is_one_clear_error(change, folder):
    with_recipe(folder, change)
    with pytest.raises(fissile.FileError, match=r"^config\.json: |has shape"):
        AutoModelForSequenceClassification.from_pretrained(folder)


def with_tensor(folder, ending, change):
    """Change the first tensor with such a name; None takes it out."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    key = min(key for key in tensors if key.endswith(ending))
    changed = change(tensors.pop(key))
    save_file(tensors if changed is None else tensors | {key: changed}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("ending", "change", "message"),
    [
        ("owner", lambda t: None, "missing"),
        ("mask", lambda t: None, "missing"),
        ("intermediate.dense.weight", lambda t: None, "missing"),
        ("owner", lambda t: t + 2, "owner"),
        ("owner", lambda t: t.long(), "owner"),
        ("owner", lambda t: t[:1].clone(), "shape"),
        ("mask", lambda t: t.to(torch.int8), "mask"),
        ("intermediate.dense.bias", lambda t: t[:5].clone(), "shape"),
        ("classifier.weight", lambda t: t[:1].clone(), "shape"),
    ],
)
def test_tensors_that_do_not_fit_are_one_clear_error(ending, change, message, folder):
    with_tensor(folder, ending, change)
    with pytest.raises(fissile.FileError, match=message):
        AutoModelForSequenceClassification.from_pretrained(folder)


def test_a_pickle_is_not_read(wide, folder):
    (folder / "model.safetensors").unlink()
    torch.save(wide.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(fissile.FileError, match="safetensors"):
        AutoModelForSequenceClassification.from_pretrained(folder)


# The Trainer


def samples():
    rows = torch.randint(1, WORDS, (16, 7), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": int(row[0] > WORDS // 2)} for row in rows]


def trainer(model, folder, *callbacks, **settings):
    """Sixteen samples in batches of four, three epochs: twelve steps."""
    chosen = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 1} | settings
    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **chosen,
    )
    data = samples()
    return Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


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


@pytest.mark.parametrize(("when", "step"), [({"step": 5}, 5), ({"epoch": 1}, 4)])
def test_training_goes_on_and_checkpoints_resume_on_either_side(when, step, tmp_path):
    run = trained(tmp_path / "whole", ExpandAt(2, **when))
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
        again = resumed(checkpoint, tmp_path / "again", ExpandAt(2, **when))
        assert same(again.model, run.model), number


def test_the_optimizer_is_carried_across(tmp_path):
    before, after = Watch(5), Watch(5)
    run = trained(tmp_path, before, ExpandAt(2, step=5), after, save_strategy="no")
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
    run = trainer(model, tmp_path, ExpandAt(2, step=6), save_steps=8)
    run.train_dataset = data
    run.train()
    losses = [log["loss"] for log in run.state.log_history if "loss" in log]
    assert losses[-1] < losses[6] < losses[0]
    assert fissile.nonzeros(model).weights == dense
    again = trainer(
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-8"),
        tmp_path / "again",
        ExpandAt(2, step=6),
        save_strategy="no",
    )
    again.train_dataset = data
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

    run = trained(tmp_path, ExpandAt(2, step=5), make=Own, save_strategy="no")
    assert len(expanded_layers(run.model)) == 2
    assert fissile.nonzeros(run.model).weights == 7 * 6 + 6 * 2


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either epoch= or step="),
        ({"epoch": 1, "step": 2}, "either epoch= or step="),
        ({"epoch": -1}, "epoch=-1"),
        ({"step": 1.5}, "step=1.5"),
        ({"alpha": 0, "step": 1}, "alpha=0"),
        ({"step": 1, "budget": "some"}, "some"),
        ({"step": 1, "split": "no such split"}, "no such split"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments, message):
    with pytest.raises(fissile.FissileError, match=message):
        ExpandAt(**{"alpha": 2} | arguments)


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
        trained(tmp_path, callback, save_strategy="no", **settings)


def test_nothing_is_expanded_twice(wide, tmp_path):
    run = trainer(wide, tmp_path, ExpandAt(2, step=5), save_strategy="no")
    with pytest.raises(fissile.FissileError, match="expanded already"):
        run.train()


def test_a_split_that_was_missed_is_noticed(tmp_path):
    trained(tmp_path, max_steps=6, save_steps=6)
    with pytest.raises(fissile.FissileError, match="step 3 is over"):
        resumed(tmp_path / "checkpoint-6", tmp_path / "again", ExpandAt(2, step=3))


@pytest.mark.parametrize("settings", [{"world_size": 2}, {"n_gpu": 2}, {"fsdp": "full_shard"}])
def test_several_processes_are_refused(settings):
    args = {"world_size": 1, "n_gpu": 0, "fsdp": None, "deepspeed": None} | settings
    state = SimpleNamespace(global_step=0, max_steps=9)
    with pytest.raises(fissile.FissileError, match=r"before making the Trainer"):
        ExpandAt(2, step=1).on_train_begin(
            SimpleNamespace(**args), state, None, model=nn.Linear(2, 2), optimizer=None
        )
