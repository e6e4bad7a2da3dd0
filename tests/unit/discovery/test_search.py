"""Finding places: every kind, code as people write it, and models as they are."""

import copy
import logging
import sys
import warnings

import pytest
import torch
from discovery_models import Net, Unreadable, halved, pair, places, why
from torch import nn
from torch.nn import functional

from fissile import MLP, FissileError
from fissile.discovery import discover, trace

MLP_PLACE = [("mlp", ("fc1",), "fc2")]

# Ways to write the same thing: an activation between two linear layers.
ODD = {
    "functional": lambda m, x: m.fc2(functional.relu(m.fc1(x))),
    "method": lambda m, x: m.fc2(m.fc1(x).relu_()),
    "walrus": lambda m, x: m.fc2(h * torch.sigmoid(h)) if (h := m.fc1(x)) is not None else x,
    "square": lambda m, x: m.fc2(m.fc1(x) ** 2),
    "itself twice": lambda m, x: m.fc2((h := m.fc1(x)) * h),
    "new gelu": lambda m, x: m.fc2(0.5 * (h := m.fc1(x)) * (1 + torch.tanh(h + h**3))),
    "where": lambda m, x: m.fc2(torch.where((h := m.fc1(x)) > 0, h, 0.1 * h)),
    "in place": lambda m, x: (h := m.fc1(x), h.relu_(), m.fc2(h))[2],
    "clamp": lambda m, x: m.fc2(m.fc1(x).clamp(min=0)),
    "on the fly": lambda m, x: m.fc2(nn.ReLU()(m.fc1(x))),
    "early dropout": lambda m, x: m.fc2(functional.dropout(m.fc1(x), 0.1, m.training).tanh()),
    "cast": lambda m, x: m.fc2(m.fc1(x).float().relu().to(x.dtype)),
    "keyword": lambda m, x: m.fc2(input=functional.gelu(input=m.fc1(x))),
    "noise": lambda m, x: m.fc2((h := m.fc1(x).relu()) + 0.1 * torch.randn_like(h)),
    "dtype asked": lambda m, x: m.fc2(m.fc1(x).relu() if x.dtype == torch.float32 else x.half()),
    "weight's dtype": lambda m, x: m.fc2(m.fc1(x).relu().to(m.fc2.weight.dtype)),
}


@pytest.mark.parametrize("way", ODD)
def test_an_activation_however_written(way):
    model = pair(ODD[way])
    assert places(model) == MLP_PLACE
    if "noise" not in way:
        assert places(model, torch.randn(5, 4)) == MLP_PLACE


def test_an_mlp_shows_all_its_pairs_in_order():
    found = discover(
        MLP([5, 7, 6, 2], embedding=4, layer_norm=True, dropout=0.1, activation="gelu")
    )
    assert [one.name for one in found] == ["layers.0", "layers.4"]
    assert found.places[0].between == ("layers.1", "layers.2", "layers.3")
    one = found.places[1]
    assert (one.inputs, one.neurons, one.outputs, one.nonzeros) == (7, 6, 2, 7 * 6 + 6 * 2)
    assert [one.name for one in found.refusals] == ["embedding", "layers.8"]


def test_zeros_are_not_counted():
    model = MLP([4, 3, 2])
    with torch.no_grad():
        model.layers[0].weight[0, :2] = 0
    assert discover(model).places[0].nonzeros == 4 * 3 + 3 * 2 - 2


def test_a_stack_of_networks():
    model = MLP([4, 3, 2])
    for layer in (model.layers[0], model.layers[2]):
        layer.weight = nn.Parameter(torch.randn(5, *layer.weight.shape))
        layer.bias = nn.Parameter(torch.randn(5, 1, *layer.bias.shape))
    (one,) = discover(model).places
    assert (one.inputs, one.neurons, one.outputs, one.nonzeros) == (4, 3, 2, 5 * 18)


def test_nested_modules_and_keyword_only_arguments():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act = nn.Linear(4, 6), nn.Sequential(nn.LayerNorm(6), nn.GELU())

        def forward(self, *, x, scale=1.0):
            return self.act(self.up(x) * scale)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.down = Inner(), nn.Linear(6, 4)

        def forward(self, x, mask=None, *, residual):
            return residual + self.down(self.inner(x=x))

    assert places(Outer()) == [("mlp", ("inner.up",), "down")]
    (one,) = discover(Outer()).places
    assert one.between == ("inner.act.0", "inner.act.1")


GATED = {
    "activation on the left": (lambda m, x: m.d(functional.silu(m.a(x)) * m.b(x)), "ab"),
    "on the right": (lambda m, x: m.d(m.a(x) * functional.silu(m.b(x))), "ba"),
    "none": (lambda m, x: m.d(m.b(x) * m.a(x)), "ab"),
    "dropout": (
        lambda m, x: m.d(functional.dropout(m.a(x).relu() * m.b(x), 0.1, m.training)),
        "ab",
    ),
}


@pytest.mark.parametrize("way", GATED)
def test_gate_and_up(way):
    run, order = GATED[way]
    model = Net(run, a=nn.Linear(4, 6), b=nn.Linear(4, 6), d=nn.Linear(6, 3))
    assert places(model) == [("gated", tuple(order), "d")]
    (one,) = discover(model, torch.randn(2, 4)).places
    assert (one.neurons, one.nonzeros) == (6, 4 * 6 * 2 + 6 * 3)


FUSED = {
    "chunk": lambda h: h.chunk(2, -1),
    "torch.chunk": lambda h: torch.chunk(h, chunks=2, dim=-1),
    "tensor_split": lambda h: h.tensor_split(2, dim=-1),
}
FIXED = {
    "split": lambda h: h.split(6, -1),
    "split with sizes": lambda h: torch.split(h, [6, 6], dim=-1),
    "slices": lambda h: (h[..., :6], h[..., 6:]),
}


@pytest.mark.parametrize("way", FUSED)
def test_gate_and_up_in_one_matrix(way):
    for inputs in (None, torch.randn(2, 4)):
        (one,) = discover(halved(FUSED[way]), inputs).places
        assert (one.kind, one.firsts, one.second, one.neurons) == ("fused", ("fc1",), "fc2", 6)


@pytest.mark.parametrize("glu", [functional.glu, nn.GLU()])
def test_glu_itself(glu):
    layers = {"act": glu} if isinstance(glu, nn.Module) else {}
    model = Net(
        lambda m, x: m.fc2(glu(m.fc1(x))), fc1=nn.Linear(4, 12), fc2=nn.Linear(6, 3), **layers
    )
    assert places(model, torch.randn(2, 4)) == [("fused", ("fc1",), "fc2")]


@pytest.mark.parametrize("way", FIXED)
def test_halves_at_a_fixed_width_would_not_widen_along(way):
    model = halved(FIXED[way])
    assert "fixed width" in why(model, "fc1")
    assert "changes what the model computes" in why(model, "fc1", torch.randn(2, 4))


@pytest.mark.parametrize(
    "way",
    [
        lambda h: (h[..., : h.shape[-1] // 2], h[..., h.size(-1) // 2 :]),
        lambda h: h.split(h.shape[-1] // 2, -1),
    ],
)
def test_halves_at_half_the_width_as_read_are_found_by_trying(way):
    assert "width is read by .shape" in why(halved(way), "fc1")
    assert places(halved(way), torch.randn(2, 4)) == [("fused", ("fc1",), "fc2")]


def test_halves_at_a_width_the_layer_knows_are_found_by_trying():
    def run(m, x):
        one, other = m.fc1(x).split(m.fc1.out_features // 2, -1)
        return m.fc2(one.relu() * other)

    model = Net(run, fc1=nn.Linear(4, 12), fc2=nn.Linear(6, 3))
    assert "fixed width" in why(model, "fc1")
    assert places(model, torch.randn(2, 4)) == [("fused", ("fc1",), "fc2")]


def vgg():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU(), nn.Dropout2d(0.1),
        nn.Conv2d(6, 4, 1), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4), nn.AdaptiveAvgPool2d(2),
        nn.Conv2d(4, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


def test_a_plain_stack_of_convolutions():
    model, inputs = vgg(), torch.randn(2, 3, 8, 8)
    expected = [("conv", (a,), b) for a, b in (("0", "4"), ("4", "8"), ("8", "12"))]
    assert places(model) == expected
    assert places(model, inputs) == expected
    assert "reshaped by '15' (Flatten)" in why(model, "12")


class Block(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.skip = nn.Sequential() if inputs == width else nn.Conv2d(inputs, width, 1)

    def forward(self, x):
        h = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        h = self.bn2(self.conv2(h))
        h += self.skip(x)
        return functional.relu(h)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layers = nn.Sequential(Block(4, 4), Block(4, 6))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = functional.max_pool2d(self.stem(x).relu(), 2)
        x = functional.adaptive_avg_pool2d(self.layers(x), 1)
        return self.head(torch.flatten(x, 1))


def test_a_residual_network():
    model = ResNet()
    expected = [("conv", (f"layers.{i}.conv1",), f"layers.{i}.conv2") for i in (0, 1)]
    assert places(model) == expected
    assert places(model, torch.randn(2, 3, 12, 12)) == expected
    for name in ("stem", "layers.0.conv2"):
        assert "combined with other neurons by add in 'layers.0' (Block)" in why(model, name)


def test_what_cannot_be_read_is_guessed_and_tried_out():
    inputs = torch.randn(5, 4)
    assert "pass example_inputs" in why(Unreadable(), "fc1")
    assert places(Unreadable(), inputs) == MLP_PLACE
    assert discover(Unreadable(), inputs).places[0].between == ("norm", "act")
    assert "widening it without splitting changes" in why(Unreadable(wrong=True), "fc1", inputs)


def test_one_wrong_guess_does_not_spoil_the_others():
    model = nn.Sequential(Unreadable(), Unreadable(wrong=True), Unreadable())
    assert [first for _, first, _ in places(model, torch.randn(5, 4))] == [("0.fc1",), ("2.fc1",)]


def test_an_untraceable_part_hides_only_itself():
    model = Net(
        lambda m, x: m.fc2(m.fc1(m.odd(x)).relu()),
        odd=Unreadable(), fc1=nn.Linear(4, 6), fc2=nn.Linear(6, 3),
    )  # fmt: skip
    assert places(model) == MLP_PLACE
    model = Net(
        lambda m, x: m.fc2(m.odd(m.fc1(x))),
        odd=Unreadable(), fc1=nn.Linear(4, 4), fc2=nn.Linear(4, 3),
    )  # fmt: skip
    assert "'odd' (Unreadable), which could not be traced" in why(model, "fc1")


def test_a_layer_that_runs_more_often_than_its_reader():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.act, self.fc2 = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)

        def forward(self, x):
            x = self.fc1(x) if float(x.sum()) < 1e9 else x
            return self.fc2(self.act(self.fc1(x)))

    assert "called more often than 'fc2'" in why(Twice(), "fc1", torch.randn(2, 4))


def test_example_inputs_of_every_form():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = MLP([4, 6, 3])

        def forward(self, x, y=None):
            return {"out": (self.net(x), [self.net(x if y is None else y)])}

    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.more = MLP([4, 6, 3]), nn.Linear(4, 6)

        def forward(self, x, y=None):
            h = self.net.layers[1](self.net.layers[0](x))
            return self.net.layers[2](h if y is None else h + self.more(y))

    x = torch.randn(5, 4)
    assert not places(Two(), (x, x)), "the layer runs twice"
    assert places(Optional(), x) == places(Optional(), (x,)) == places(Optional(), {"x": x})
    assert len(places(Optional(), x)) == 1
    assert not places(Optional(), {"x": x, "y": x})


def test_example_inputs_that_do_not_fit():
    with pytest.raises(FissileError, match="does not run with these example_inputs"):
        discover(MLP([4, 6, 3]), torch.randn(5, 3))
    with pytest.raises(FissileError, match="does not run with these example_inputs"):
        discover(MLP([4, 6, 3]), {"y": torch.randn(5, 4)})


def test_a_model_that_cannot_be_copied():
    model = MLP([4, 6, 3])
    model.reader = open(__file__)  # noqa: SIM115
    with model.reader, pytest.raises(FissileError, match="cannot be copied"):
        discover(model)


class Talkative(nn.Module):
    """Forward code that prints, warns, draws random numbers and changes the module."""

    def __init__(self):
        super().__init__()
        self.net, self.norm = MLP([4, 6, 3], dropout=0.1), nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(()))
        self.count, self.seen = 0, []

    def forward(self, x):
        print("forward")
        warnings.warn("forward", stacklevel=1)
        self.count += 1
        self.steps += 1
        torch.rand(3)
        return self.net(self.norm(x) + torch.ones(4))


@pytest.mark.filterwarnings("ignore:forward")
@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_world_stay_as_they_are(training):
    model = nn.Sequential(Talkative(), nn.Linear(3, 3)).train(training)
    model[0].norm.eval()
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    attributes = [dict(vars(module)) for module in model.modules()]
    for inputs in (None, torch.randn(5, 4, generator=torch.Generator().manual_seed(0))):
        assert len(discover(model, inputs)) == 1
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before | after)
    assert torch.equal(state, torch.random.get_rng_state())
    assert attributes == [vars(module) for module in model.modules()]
    assert nn.Module.__call__.__qualname__.startswith("Module.")


class Watching(nn.Module):
    """Forward code that notes what other threads would see of the process while it is traced."""

    def __init__(self):
        super().__init__()
        self.net = MLP([4, 6, 3])

    def forward(self, x):
        SEEN.append((sys.stdout, sys.stderr, logging.root.manager.disable, list(warnings.filters)))
        return self.net(x)


SEEN = []


@pytest.mark.parametrize("inputs", [None, torch.ones(5, 4)])
def test_output_logging_and_warnings_of_the_process_are_left_alone(inputs):
    SEEN.clear()
    world = sys.stdout, sys.stderr, logging.root.manager.disable, list(warnings.filters)
    assert len(discover(Watching(), inputs)) == 1
    assert SEEN
    assert all(seen == world for seen in SEEN)


def test_torch_s_own_transformer():
    model = nn.Transformer(8, 2, 1, 2, 12, batch_first=True, activation="gelu")
    expected = ["encoder.layers.0", "decoder.layers.0", "decoder.layers.1"]
    inputs = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    for found in (discover(model), discover(model, inputs)):
        assert [(one.kind, one.firsts, one.second) for one in found] == [
            ("mlp", (f"{name}.linear1",), f"{name}.linear2") for name in expected
        ]
        assert found.places[0].between == ("encoder.layers.0.dropout",)
    assert "inside attention" in why(model, "decoder.layers.1.multihead_attn.out_proj")


def test_a_transformer_with_an_activation_that_mixes():
    layer = nn.TransformerEncoderLayer(8, 2, 12, activation=lambda x: x.softmax(-1))
    assert ".softmax(), which may mix" in why(layer, "linear1")
    layer = nn.TransformerEncoderLayer(8, 2, 12, activation=lambda x: functional.gelu(2 * x))
    assert places(layer) == [("mlp", ("linear1",), "linear2")]


TINY = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 30,
}  # fmt: skip
T5 = {"vocab_size": 30, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2}
GPT2 = {"vocab_size": 30, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
PATCHES = TINY | {"image_size": 8, "patch_size": 4}
LLAMA = ("gated", "model.layers.{}.mlp.", ["gate_proj", "up_proj", "down_proj"])
# The class without its ending, what it is made with, the kind, where, the layers.
ARCHITECTURES = {
    "BertForTokenClassification": (
        TINY, "mlp", "bert.encoder.layer.{}.", ["intermediate.dense", "output.dense"],
    ),
    "GPT2LMHeadModel": (GPT2, "mlp", "transformer.h.{}.mlp.", ["c_fc", "c_proj"]),
    "LlamaForCausalLM": (TINY, *LLAMA),
    "Qwen2ForCausalLM": (TINY | {"num_key_value_heads": 2}, *LLAMA),
    "Phi3ForCausalLM": (
        TINY | {"pad_token_id": 0}, "fused", "model.layers.{}.mlp.", ["gate_up_proj", "down_proj"],
    ),
    "ViTForImageClassification": (PATCHES, "mlp", "vit.layers.{}.mlp.", ["fc1", "fc2"]),
}  # fmt: skip


def built(name, settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**settings))


def batch(name):
    if name.startswith("ViT"):
        return {"pixel_values": torch.randn(2, 3, 8, 8)}
    ids = {"input_ids": torch.randint(1, 30, (1, 5))}
    return ids | {"decoder_input_ids": ids["input_ids"]} if name.startswith("T5") else ids


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_models(name):
    settings, kind, path, layers = ARCHITECTURES[name]
    model = built(name, settings)
    expected = []
    for i in (0, 1):
        *firsts, second = [path.format(i) + layer for layer in layers]
        expected.append((kind, tuple(firsts), second))
    assert places(model) == expected
    assert places(model, batch(name)) == expected
    parts = (".query", ".c_attn", ".q_proj", ".qkv_proj")
    inside = [one for one in discover(model).refusals if one.name.endswith(parts)]
    assert len(inside) == 2
    assert all("inside attention" in one.reason for one in inside)


def test_a_tied_head_keeps_what_feeds_it():
    model = built("BertForMaskedLM", TINY)
    assert len(discover(model)) == 2
    assert "tied" in why(model, "cls.predictions.transform.dense")


@pytest.mark.parametrize("act", ["relu", "gated-gelu"])
def test_t5(act):
    model = built("T5ForConditionalGeneration", T5 | {"feed_forward_proj": act})
    kind, firsts = ("mlp", ["wi"]) if act == "relu" else ("gated", ["wi_0", "wi_1"])
    where = [
        f"{side}.block.{i}.layer.{j}.DenseReluDense."
        for side, j in (("encoder", 1), ("decoder", 2))
        for i in (0, 1)
    ]
    expected = [(kind, tuple(start + n for n in firsts), f"{start}wo") for start in where]
    assert places(model) == expected
    assert places(model, batch("T5")) == expected


def test_the_table():
    assert str(discover(MLP([32, 8, 1]))).splitlines() == [
        "place     kind  inputs → neurons → outputs  non-zeros",
        "layers.0  mlp   32 → 8 → 1                        264",
        "",
        "refused   kind    shape  why",
        "layers.2  linear  8 → 1  its output is what the model returns",
    ]
    assert str(discover(nn.Linear(2, 3))).startswith("no place can be split\n\nrefused  kind")
    assert str(discover(nn.ReLU())) == "no place can be split"


def test_many_layers_alike_are_not_tried_one_by_one(monkeypatch):
    calls = []
    traced = trace._Tracer.trace
    monkeypatch.setattr(trace._Tracer, "trace", lambda *args: calls.append(0) or traced(*args))
    for depth in (10, 20):
        model = nn.Sequential(*[nn.Sequential(Unreadable(), MLP([4, 6, 4])) for _ in range(depth)])
        calls.append(depth)
        assert len(discover(model)) == depth
    assert calls[0] == 10
    middle = calls.index(20)
    assert len(calls[:middle]) == len(calls[middle:])
