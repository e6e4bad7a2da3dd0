import copy
import json
import pickle
import random
import shutil
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file

import fissile
from fissile.expansion.saving import seal
from fissile.layers import SparseLayer

pytest.importorskip("transformers")

from language_models import MODELS, WORDS, expanded_layers, ids, logits, seeded, t5
from networks import same
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForCausalLM,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import fissile.integrations.transformers  # teaches from_pretrained to read what was expanded


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
    assert torch.equal(logits(copy.deepcopy(plain)), logits(plain))
    pickled = pickle.loads(pickle.dumps(plain))
    assert torch.equal(logits(pickled), logits(plain))


@pytest.mark.parametrize("made", ["expanded", "copied", "loaded", "masked"])
def test_without_fissile_a_folder_says_what_it_takes(made, wide, folder, tmp_path, monkeypatch):
    model = wide
    if made != "expanded":
        model = copy.deepcopy(wide) if made == "copied" else fissile.to_masked(wide)
        if made == "loaded":
            model = AutoModelForSequenceClassification.from_pretrained(folder)
            assert not hasattr(model.config, "transformers_weights")
    model.save_pretrained(tmp_path / "again")
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(back), logits(wide))
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "fissile")
    for options in ({}, {"ignore_mismatched_sizes": True}):
        for kind in (AutoModelForSequenceClassification, type(wide), AutoModel):
            with pytest.raises(ValueError, match=r"fissile\.integrations\.transformers` before"):
                kind.from_pretrained(tmp_path / "again", **options)


def distilbert():
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    return DistilBertForSequenceClassification(DistilBertConfig(vocab_size=WORDS, **sizes))


def roberta():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = RobertaConfig(vocab_size=WORDS, intermediate_size=24, **sizes)
    return RobertaForSequenceClassification(config)


@pytest.mark.parametrize("make", [distilbert, roberta])
def test_plain_layers_that_no_config_describes_are_not_saved(make, tmp_path, monkeypatch):
    dense = seeded(make)
    wide = fissile.expand(dense, 2)  # the head widens too
    plain = fissile.to_dense(wide)
    message = r"is \(48, 16\), and \(24, 16\) in a model made from the config.*with where="
    for one in (plain, copy.deepcopy(plain)):
        with pytest.raises(fissile.FissileError, match=message):
            one.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
    wide.save_pretrained(tmp_path / "wide")  # as the message advises
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "wide")
    assert torch.equal(logits(back), logits(wide))
    plain = fissile.to_dense(fissile.expand(dense, 2, where="*.layer.*"))
    plain.save_pretrained(tmp_path / "plain")
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "fissile")
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(back), logits(plain))


def test_what_was_written_out_may_be_expanded_and_saved_again(wide, tmp_path):
    again = fissile.expand(fissile.to_dense(wide), 2)
    again.save_pretrained(tmp_path)
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(back), logits(again))


def test_a_quantised_model_keeps_its_own_config(wide):
    other = {"quant_method": "gptq"}
    wide.config.quantization_config = other
    assert fissile.to_masked(wide).config.quantization_config == other
    assert fissile.to_dense(wide).config.quantization_config == other


# Torn and hostile files


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_no_other_numbers_than_were_saved_are_loaded(file, wide, folder):
    """Bits are flipped all over the file; in a config they may be white space."""
    path, rng = folder / file, random.Random(0)
    data = path.read_bytes()
    for _ in range(60):
        spoilt = bytearray(data)
        spoilt[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(spoilt)
        if file == "config.json":
            with suppress(ValueError):
                if json.loads(spoilt) == json.loads(data):
                    continue
        with pytest.raises(fissile.FileError, match=str(folder)):
            AutoModelForSequenceClassification.from_pretrained(folder)
    path.write_bytes(data)
    assert torch.equal(
        logits(AutoModelForSequenceClassification.from_pretrained(folder)), logits(wide)
    )


def test_shards_and_their_index_have_checksums(wide, tmp_path):
    wide.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "shards")
    assert torch.equal(logits(back), logits(wide))
    index = tmp_path / "shards" / "model.safetensors.index.json"
    index.write_text(index.read_text() + " ")
    with pytest.raises(fissile.FileError, match=r"index\.json is not the file that was saved"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "shards")


def test_a_config_of_an_expanded_model_has_a_checksum(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["crc32"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(fissile.FileError, match=r"config\.json: .*its checksum differs"):
        AutoModelForSequenceClassification.from_pretrained(folder)


def with_recipe(folder, change):
    """Change the recipe in a saved model's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = change(config["quantization_config"])
    path.write_text(json.dumps(config))
    seal(folder)  # what is refused is not the checksum


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
    with pytest.raises(fissile.FileError, match=r"config\.json: |has shape"):
        AutoModelForSequenceClassification.from_pretrained(folder)


def with_tensor(folder, ending, change):
    """Change the first tensor with such a name; None takes it out."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    key = min(key for key in tensors if key.endswith(ending))
    changed = change(tensors.pop(key))
    save_file(tensors if changed is None else tensors | {key: changed}, path, {"format": "pt"})
    seal(folder)


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
