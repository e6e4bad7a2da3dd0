"""Known architectures, tiny: expanded, trained, saved, compiled, and handed on as dense models."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import nn
from torch.nn import functional

import fissile
from fissile import discover, expand, load, nonzeros, save, to_dense
from fissile._common.random import drawer
from fissile.expansion.expand import choose

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

IDS = torch.arange(10).view(2, 5) * 7 % 30
SMALL = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
}  # fmt: skip
TEXT = SMALL | {
    "vocab_size": 30, "max_position_embeddings": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
T5 = {
    "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "vocab_size": 30,
    "decoder_start_token_id": 0,
}  # fmt: skip
GPT2 = {
    "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 30, "n_positions": 16,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Residual(nn.Module):
    """A block of a ResNet: two convolutions and a way round them."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.short = None if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x):
        around = x if self.short is None else self.short(x)
        return functional.relu(
            self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))) + around
        )


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.layers = nn.Sequential(Residual(6, 6), Residual(6, 8, stride=2))
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.layers(functional.relu(self.stem(x))).mean((-2, -1)))


def vgg():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2), nn.PReLU(8), nn.Dropout2d(0.1),
        nn.Conv2d(8, 6, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4),
    )  # fmt: skip


class Odd(nn.Module):
    """Code one meets in the wild: helpers, keyword arguments, a loop, an activation by hand."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"in": nn.Linear(8, 12), "out": nn.Linear(12, 8)})
        self.experts = nn.ModuleList(nn.Linear(8, 6) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(6, 8) for _ in range(2))

    def _swish(self, x):
        return x * torch.sigmoid(1.7 * x)

    def forward(self, x, *, scale=2.0):
        y = self.parts["out"](self._swish(h) if (h := self.parts["in"](x)) is not None else x)
        for expert, back in zip(self.experts, self.back, strict=True):
            y = y + back(functional.dropout(expert(y).clamp(min=0) ** 2, 0.1, self.training))
        return y * scale


@dataclass(frozen=True)
class Architecture:
    make: Callable[[], nn.Module]
    inputs: dict[str, Any]
    places: int
    width: str | None = None  # where a config of transformers notes the width

    def answer(self, model):
        out = model(**self.inputs)
        return out if isinstance(out, torch.Tensor) else out.logits


def hf(name, config, inputs, places, width="intermediate_size", **settings):
    def make():
        return getattr(transformers, name)(getattr(transformers, config)(**settings))

    return Architecture(make, inputs, places, width)


IMAGE = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)}
PAIR = {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)}
PIXELS = {"x": IMAGE["pixel_values"]}
ALL = {
    "BERT": hf("BertForMaskedLM", "BertConfig", {"input_ids": IDS}, 2, **TEXT),
    "GPT-2": hf("GPT2LMHeadModel", "GPT2Config", {"input_ids": IDS}, 2, "n_inner", **GPT2),
    "Llama": hf("LlamaForCausalLM", "LlamaConfig", {"input_ids": IDS}, 2, **TEXT),
    "Qwen2": hf("Qwen2ForCausalLM", "Qwen2Config", {"input_ids": IDS}, 2, num_key_value_heads=2,
                **TEXT),
    "Phi-3": hf("Phi3ForCausalLM", "Phi3Config", {"input_ids": IDS}, 2, **TEXT),
    "ViT": hf("ViTForImageClassification", "ViTConfig", IMAGE, 2, image_size=8, patch_size=4,
              **SMALL),
    "T5": hf("T5ForConditionalGeneration", "T5Config", PAIR, 2, "d_ff", **T5),
    "T5 gated": hf("T5ForConditionalGeneration", "T5Config", PAIR, 2, "d_ff",
                   feed_forward_proj="gated-gelu", **T5),
    "ResNet": Architecture(ResNet, PIXELS, 2),
    "VGG": Architecture(vgg, {"input": PIXELS["x"]}, 3),
    "encoder": Architecture(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2),
        {"src": torch.linspace(-1, 1, 80).view(2, 5, 8)}, 2,
    ),
    "decoder": Architecture(
        lambda: nn.Transformer(8, 2, 1, 1, 12, batch_first=True),
        {name: torch.linspace(-1, 1, 80).view(2, 5, 8) for name in ("src", "tgt")}, 2,
    ),
    "odd code": Architecture(Odd, {"x": torch.linspace(-1, 1, 40).view(5, 8), "scale": 0.5}, 3),
}  # fmt: skip
EVERY = pytest.mark.parametrize("architecture", ALL.values(), ids=ALL)
PRETRAINED = {name: one for name, one in ALL.items() if one.width is not None}


def trained(architecture, steps=1):
    torch.manual_seed(0)
    model = architecture.make().train()
    adam = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    train(architecture, model, adam, steps)
    return model, adam


def train(architecture, model, optimizer, steps):
    for _ in range(steps):
        loss = (architecture.answer(model) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(loss)


def count(model, names):
    """The non-zero weights of some layers, by value."""
    plain = to_dense(model)
    return sum(int(plain.get_submodule(name).weight.count_nonzero()) for name in names)


def blocks(layer):
    weight = layer.weight.detach().double()
    weight = weight.T if type(layer).__name__ == "Conv1D" else weight
    return weight.flatten(2).numpy() if weight.ndim == 4 else weight.unsqueeze(-1).numpy()


@torch.no_grad()
def assert_same(architecture, one, other):
    torch.testing.assert_close(architecture.answer(one.eval()), architecture.answer(other.eval()))


@EVERY
def test_expands_trains_and_comes_back_from_a_file(architecture, tmp_path):
    dense, adam = trained(architecture)
    places = choose(discover(dense), None)
    assert len(places) == architecture.places
    before = copy.deepcopy(dense.state_dict())
    wide = expand(dense, 2, optimizer=adam)
    assert all(torch.equal(before[k], v) for k, v in dense.state_dict().items())
    assert nonzeros(wide).weights == nonzeros(dense).weights
    for place in places:
        assert count(wide, place.layers) == count(dense, place.layers) == place.nonzeros
    assert_same(architecture, wide, to_dense(wide))
    train(architecture, wide.train(), adam, 3)
    moved = {name for name, p in wide.named_parameters() if p in adam.state and p.requires_grad}
    assert moved == {name for name, _ in wide.named_parameters()}
    for place in places:
        assert count(wide, place.layers) <= place.nonzeros
        assert sum(wide.get_submodule(n).nonzeros() for n in place.layers) == place.nonzeros
    save(wide, tmp_path / "wide")
    back = load(tmp_path / "wide", architecture.make())
    assert_same(architecture, back, wide)
    assert nonzeros(back) == nonzeros(wide)


@EVERY
def test_a_place_is_the_references(architecture):
    torch.manual_seed(1)
    dense = architecture.make()
    place = choose(discover(dense), None)[-1]
    wide = to_dense(expand(dense, 3, where=place.name, seed=5))
    firsts = [blocks(dense.get_submodule(name)) for name in place.firsts]
    firsts = np.split(firsts[0], 2) if place.kind == "fused" else firsts
    rows = [torch.tensor(f[:, :, p]) for f in firsts for p in range(f.shape[2])]
    draw = drawer(torch.Generator().manual_seed(5))
    owner = fissile.Random().deal(torch.cat(rows), 3, draw)[: place.neurons].tolist()
    wides, second = reference.expand_many(
        firsts, blocks(dense.get_submodule(place.second)), owner, 3
    )
    mine = [blocks(wide.get_submodule(name)) for name in place.firsts]
    np.testing.assert_array_equal(np.concatenate(mine), np.concatenate(wides))
    np.testing.assert_array_equal(blocks(wide.get_submodule(place.second)), second)


@pytest.mark.slow
@EVERY
def test_compiled_is_eager(architecture):
    torch.manual_seed(0)
    wide = expand(architecture.make(), 2).eval()
    with torch.no_grad():
        expected = architecture.answer(wide)
        compiled = torch.compile(wide, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(architecture.answer(compiled), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("name", PRETRAINED)
def test_the_dense_wide_model_is_one_of_transformers_own(name, tmp_path):
    architecture = PRETRAINED[name]
    torch.manual_seed(0)
    dense = architecture.make()
    old = getattr(dense.config, architecture.width) or 32
    wide = expand(dense, 2)
    assert (getattr(dense.config, architecture.width) or 32) == old, "the given config was touched"
    to_dense(wide).save_pretrained(tmp_path)
    back = type(dense).from_pretrained(tmp_path)
    assert getattr(back.config, architecture.width) == 2 * old
    assert_same(architecture, back, wide)


@pytest.mark.parametrize("name", ["BERT", "GPT-2"])
def test_a_model_widened_in_part_keeps_its_config(name):
    dense = ALL[name].make()
    wide = expand(dense, 2, where=[choose(discover(dense), None)[0].name])
    kept = wide.config.to_dict()
    kept.pop("quantization_config")  # the recipe
    assert kept == dense.config.to_dict()
    assert nonzeros(wide).weights == nonzeros(dense).weights
    assert_same(ALL[name], wide, to_dense(wide))
