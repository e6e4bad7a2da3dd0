"""Check expansion on small models of many architectures and write docs/parts/architectures.md.

    python docs/scripts/architectures.py && python docs/scripts/include.py

Every mark in the table is a check that ran. The models have random weights: this shows that
expansion works on them, not that it helps.
"""

import tempfile
from pathlib import Path

import torch
import transformers
from torch import nn

import fissile
import fissile.integrations.transformers
from fissile.integrations.export import to_onnx

TINY = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
GROUPED = TINY | {"num_key_value_heads": 2, "use_cache": False}
TOKENS = {"input_ids": torch.arange(12).view(2, 6)}
SEEN = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
T5 = {
    "vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        """Add what the block finds to what it was given."""
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(x + inner)


def resnet():
    """Make a stem, two residual blocks and a head."""
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    blocks = [Residual(8), Residual(8)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, *pool, nn.Linear(8, 5))


def vgg():
    """Make two pairs of convolutions with pooling, and an MLP on what is left."""
    layers = []
    for inputs, width in ((3, 8), (8, 12)):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(12 * 16, 16), nn.ReLU(), nn.Linear(16, 5)]
    return nn.Sequential(*layers, *head)


def encoder():
    """Make torch's own transformer encoder."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def of(config, kind, **settings):
    """Return what makes a model of transformers from its config."""
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**settings))


#: A name, what makes the model, and what the model is called with.
ARCHITECTURES = {
    "BERT": (of("BertConfig", "BertModel", **TINY), TOKENS),
    "GPT-2": (
        of("GPT2Config", "GPT2LMHeadModel", vocab_size=60, n_embd=32, n_layer=2, n_head=4,
           use_cache=False),
        TOKENS,
    ),
    "Llama": (of("LlamaConfig", "LlamaForCausalLM", **GROUPED), TOKENS),
    "Mistral": (of("MistralConfig", "MistralForCausalLM", **GROUPED), TOKENS),
    "Qwen2": (of("Qwen2Config", "Qwen2ForCausalLM", **GROUPED), TOKENS),
    "Phi-3": (of("Phi3Config", "Phi3ForCausalLM", **GROUPED, pad_token_id=0), TOKENS),
    "ViT": (
        of("ViTConfig", "ViTForImageClassification", image_size=16, patch_size=8,
           **{key: value for key, value in TINY.items() if key != "vocab_size"}),
        {"pixel_values": SEEN},
    ),
    "T5": (
        of("T5Config", "T5ForConditionalGeneration", **T5),
        TOKENS | {"decoder_input_ids": TOKENS["input_ids"]},
    ),
    "T5, gated": (
        of("T5Config", "T5ForConditionalGeneration", **T5, feed_forward_proj="gated-gelu"),
        TOKENS | {"decoder_input_ids": TOKENS["input_ids"]},
    ),
    "ResNet-style": (resnet, {"input": SEEN}),
    "VGG-style": (vgg, {"input": SEEN}),
    "nn.TransformerEncoder": (encoder, {"src": torch.rand(2, 6, 32)}),
}  # fmt: skip


def answer(model, inputs):
    """Return what a model says, as one tensor."""
    out = model(**inputs)
    if isinstance(out, torch.Tensor):
        return out
    return out["logits"] if "logits" in out else out["last_hidden_state"]


def same(one, other, inputs):
    """Tell whether two models say the same."""
    with torch.no_grad():
        return torch.allclose(answer(one, inputs), answer(other, inputs), rtol=1e-4, atol=1e-5)


def trains(wide, adam, inputs):
    """Make three steps; the loss is finite, every expanded layer has a gradient, none revives."""
    before = fissile.nonzeros(wide).weights
    wide.train()
    for _ in range(3):
        loss = answer(wide, inputs).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    wide.eval()
    layers = [m for m in wide.modules() if isinstance(m, fissile.layers.SparseLayer)]
    moved = all(m.weight.grad is not None and bool(m.weight.grad.any()) for m in layers)
    return bool(torch.isfinite(loss)) and moved and fissile.nonzeros(wide).weights == before


def saves(make, wide, inputs, folder):
    """Save, and load into a fresh dense model."""
    fissile.save(wide, folder / "wide.safetensors")
    return same(fissile.load(folder / "wide.safetensors", make()).eval(), wide, inputs)


def compiles(wide, inputs):
    """Compile ahead of time, without generating machine code."""
    return same(torch.compile(wide, backend="aot_eager"), wide, inputs)


def exports(wide, inputs):
    """Export with torch.export."""
    return same(torch.export.export(wide, (), inputs).module(), wide, inputs)


def converts(wide, inputs, folder):
    """Write an ONNX file, which is compared with PyTorch on two sizes of batch."""
    to_onnx(wide, folder / "wide.onnx", inputs)
    return (folder / "wide.onnx").exists()


def ships(wide, inputs, folder):
    """Write with transformers and read again: expanded, and as plain layers without fissile."""
    good = True
    for name, one in {"wide": wide, "plain": fissile.to_dense(wide)}.items():
        one.save_pretrained(folder / name)
        good &= same(type(one).from_pretrained(folder / name).eval(), wide, inputs)
    return good


def row(name):
    """Run all checks on one architecture and return its line of the table."""
    make, inputs = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = make().eval()
    places = fissile.discover(model).places
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    answer(model.train(), inputs).square().mean().backward()
    adam.step()  # so that there are moments to be carried
    model.eval()
    wide = fissile.expand(model, alpha=2, optimizer=adam)
    firsts = [wide.get_submodule(place.name) for place in places]
    split = sum(isinstance(first, fissile.layers.Partitioned) for first in firsts)
    with tempfile.TemporaryDirectory() as folder:
        checks = [
            fissile.nonzeros(wide).weights == fissile.nonzeros(model).weights,
            trains(wide, adam, inputs),
            saves(make, wide, inputs, Path(folder)),
            compiles(wide, inputs),
            exports(wide, inputs),
            converts(wide, inputs, Path(folder)),
        ]
        if isinstance(model, transformers.PreTrainedModel):
            checks.append(ships(wide, inputs, Path(folder)))
    kinds = ", ".join(sorted({place.kind for place in places}))
    marks = ["✓" if check else "✗" for check in checks] + ["–"] * (7 - len(checks))
    return f"| {name} | {len(places)} | {kinds} | {split} | {' | '.join(marks)} |"


def table():
    """Return the whole table."""
    head = (
        "| architecture | places | kind | split | exact budget | three steps of AdamW | "
        "`save`, `load` | `torch.compile` | `torch.export` | ONNX | `from_pretrained` |"
    )
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    rows = [row(name) for name in ARCHITECTURES]
    lines = [f"Two layers each, random weights, alpha 2; {versions}.", "", head, "|---" * 11 + "|"]
    return "\n".join([*lines, *rows]) + "\n"


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    (Path(__file__).parents[1] / "parts" / "architectures.md").write_text(table(), "utf-8")
