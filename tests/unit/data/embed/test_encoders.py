"""Encoders by name: frozen, with all their weights, or refused with advice."""

import sys
import textwrap

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from fissile._common.errors import FileError, FissileError
from fissile.cli.__main__ import main
from fissile.data.catalogue import ENTRIES
from fissile.data.embed import encoder
from fissile.data.embed.encoders import ImageEncoder, TextEncoder, fingerprint, square
from fissile.data.embed.run import stem

HERE = f"module:{__name__}"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1))
        self.shapes = []

    def forward(self, images):
        self.shapes.append((*images.shape, torch.is_inference_mode_enabled()))
        return self.body(images)


def net():
    return Net()


def sized():
    made = Net()
    made.input_size = (3, 48, 48)
    return made


def own():
    made = Net()
    made.preprocess = lambda image: torch.full((3, 9, 9), float(image.size[0]))
    return made


def lines():
    raise RuntimeError("no network:\n  try again\n")


def number():
    return 3


def vector():
    return nn.Flatten(0)


def pictures(coder, count=3):
    return [coder.prepare(Image.effect_noise((40, 30), 50)) for _ in range(count)]


@pytest.mark.parametrize(("factory", "side"), [("net", 224), ("sized", 48), ("own", 9)])
def test_a_module_of_ones_own(factory, side):
    coder = encoder(f"{HERE}:{factory}")
    assert (coder.kind, coder.width) == ("images", 4)
    images = pictures(coder)
    found = coder.encode(images)
    assert found.shape == (3, 4)
    assert found.dtype == torch.float32
    assert torch.equal(found, coder.encode(images))  # no dropout
    net = coder._forward if factory == "own" else coder._forward.module
    assert net.shapes[-1] == (3, 3, side, side, True)
    assert not any(p.requires_grad for p in net.parameters())


def test_mixed_precision():
    torch.manual_seed(0)
    full, mixed = encoder(f"{HERE}:net"), encoder(f"{HERE}:net")
    mixed._forward.load_state_dict(full._forward.state_dict())
    mixed._dtype = torch.bfloat16  # as on a GPU
    images = pictures(full)
    exact, rough = full.encode(images), mixed.encode(images)
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.05)
    assert full.key.split()[0] == "float32"
    mixed._note(rough)
    assert mixed.key.split()[0] == "bfloat16"


def test_the_middle_of_an_image_is_kept():
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200
    assert (square(10)(Image.fromarray(wide)) == 200).all()
    assert square(10)(Image.fromarray(np.zeros((50, 20, 3), np.uint8))).shape == (3, 10, 10)


def test_other_weights_have_another_key():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).bfloat16()
    before = fingerprint(model)
    assert fingerprint(model) == before
    with torch.no_grad():
        model[0].bias[1] += 1
    assert fingerprint(model) != before


class Loud(nn.Sequential):
    """The same weights in another forward."""

    def forward(self, images):
        return super().forward(images) * self.loudness


def loud(loudness=1.0, prepare=None):
    torch.manual_seed(0)
    made = Loud(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))
    made.loudness = loudness
    return ImageEncoder("loud", made, prepare or floats)


def floats(image):
    return torch.tensor(np.asarray(image)).permute(2, 0, 1) / 255


def test_another_preprocessing_has_another_key():
    keys = [
        loud().key,
        loud(loudness=1.01).key,
        loud(prepare=lambda image: floats(image) - 0.01).key,
        loud(prepare=lambda image: floats(image.resize((64, 64)))).key,
        loud(prepare=lambda image: floats(image.crop((0, 0, 256, 256)))).key,
        loud(prepare=lambda image: floats(image).flip(0)).key,
        loud(prepare=lambda image: floats(image).flip(2)).key,
    ]
    assert len(set(keys)) == len(keys)
    assert loud().key == keys[0]
    noisy = loud(prepare=lambda image: floats(image) * (1 + 1e-7))
    assert noisy.key == keys[0]  # rounding is nobody's fault


def test_the_key_of_an_encoder_of_texts():
    class Cut(Sentences):
        def encode(self, texts, **options):
            return super().encode([text[:1000] for text in texts], **options)

    keys = {TextEncoder("lengths", model).key for model in (Sentences(), Sentences(), Cut())}
    assert len(keys) == 2


class Sentences(nn.Module):
    """As sentence-transformers has it."""

    def encode(self, texts, batch_size, convert_to_tensor, show_progress_bar):
        assert convert_to_tensor
        assert not show_progress_bar
        return torch.tensor([[len(text), 1.0] for text in texts])


def test_texts_pass_as_they_are():
    coder = TextEncoder("lengths", Sentences())
    assert (coder.kind, coder.width) == ("text", 2)
    assert coder.encode([coder.prepare("abc"), coder.prepare("")]).tolist() == [[3, 1], [0, 1]]


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ("", "there is no encoder '';.*open_clip:ViT-B-16/openai"),
        ("clip", "there is no encoder 'clip'"),
        ("efficientnet_lite:7", "0 … 4; give one"),
        ("efficientnet_lite:4", "pip install efficientnet-lite4-pytorch-model|fissile.lite"),
        ("minilm:L12", "takes nothing after it"),
        ("sentence:", "give sentence:FOLDER"),
        ("module:", "give module:PACKAGE.MODULE:FACTORY"),
        ("module:nowhere:net", "No module named 'nowhere'; give module:"),
        (f"{HERE}:nothing", "nothing.*give module:"),
        (f"{HERE}:number", "returned a int; it must return an nn.Module"),
        (f"{HERE}:vector", "must return rows of features"),
        (f"{HERE}:lines", "could not be made: no network: try again$"),
        (f"{HERE}:pictures", "could not be made: pictures.. missing 1 required"),
    ],
)
def test_bad_names(spec, advice):
    with pytest.raises(FissileError, match=advice):
        encoder(spec)


@pytest.mark.parametrize(
    ("source", "name", "width", "pca", "entry"),
    [
        ("cifar100", "open_clip:ViT-B-16/openai", 512, None, "cifar100-clip"),
        ("imagenet1k", "open_clip:ViT-B-16/openai", 512, None, "imagenet1k-clip"),
        ("cifar100", "efficientnet_lite:2", 1280, 512, "cifar100-efficientnet-lite2"),
        ("clinc150", "all-MiniLM-L6-v2", 384, None, "clinc150-minilm"),
        ("banking77", "all-MiniLM-L6-v2", 384, None, "banking77-minilm"),
    ],
)
def test_the_catalogue_finds_what_is_made(source, name, width, pca, entry, tmp_path):
    made = tmp_path / f"{stem(source, name, width, pca=pca)}.safetensors"
    made.touch()
    assert any(layout.find(tmp_path) == made for layout in ENTRIES[entry].files)


def test_names_tell_encoders_apart():
    names = [
        stem("s", "open_clip:ViT-B-16/openai", 512),
        stem("s", "open_clip:ViT-B-16/openai", 512, pca=64),
        stem("s", "open_clip:ViT-B-16/openai", 512, pca=512),
        stem("s", "open_clip:ViT-B-16/openai", 768, pca=512),
        stem("s", "efficientnet_lite:0", 1280, pca=1280),
        stem("s", "efficientnet_lite:0", 1280),
        stem("s", "minilm", 384, pca=384),
        stem("s", "open_clip:ViT-B-16/openai", 512, normalize=True),
        stem("s", "open_clip:ViT-B-16/laion2b_s34b_b88k", 512),
        stem("s", "timm:vit_base_patch16_224.dino", 768),
        stem("s", "sentence:some/model", 768),
    ]
    assert len(set(names)) == len(names)
    assert names[2] == "s-clip-vit-b-16-pca512"
    assert "s-timm-vit-base-patch16-224.dino-768" in names
    assert not any("/" in name for name in names)


# --- libraries that are not installed with the tests, as small as they can be


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Write a package that can be imported for the length of a test."""

    def write(name, **modules):
        (tmp_path / name).mkdir()
        for module, text in modules.items():
            (tmp_path / name / f"{module}.py").write_text(textwrap.dedent(text))

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in ("open_clip", "timm")]:
        del sys.modules[name]


CLIP = """
    import torch
    calls = []
    def get_pretrained_cfg(model, tag):
        return {"quick_gelu": True} if tag == "openai" else {}
    def create_model_and_transforms(model, **options):
        calls.append((model, options))
        if model == "none":
            raise RuntimeError("Model config for 'none' not found")
        made = torch.nn.Conv2d(3, 512, 8)
        made.encode_image = lambda images: made(images).mean((2, 3))
        prepare = lambda image: torch.zeros(3, 8, 8)
        return made, None, prepare
"""


def test_open_clip_by_tag_and_from_a_file(library, tmp_path):
    library("open_clip", __init__=CLIP)
    coder = encoder("open_clip:ViT-B-16/openai")
    assert (coder.name, coder.width) == ("open_clip:ViT-B-16/openai", 512)
    calls = sys.modules["open_clip"].calls
    # OpenAI's weights go with another activation, and no file is ever unpickled.
    only = {"weights_only": True}
    assert calls == [("ViT-B-16", {"pretrained": "openai", "force_quick_gelu": True} | only)]
    file = tmp_path / "mine.safetensors"
    with pytest.raises(FileError, match=r"mine.safetensors is not there"):
        encoder(f"open_clip:ViT-B-16/{file}")
    file.touch()
    assert encoder(f"open_clip:ViT-B-16/{file}").name == "open_clip:ViT-B-16/mine.safetensors"
    assert calls[1][1] == {"pretrained": str(file), "force_quick_gelu": False} | only
    for spec in ("ViT-B-16", "ViT-B-16/", "/openai"):
        with pytest.raises(FissileError, match="names no weights"):
            encoder(f"open_clip:{spec}")
    with pytest.raises(FissileError, match="could not be made: Model config for 'none'"):
        encoder("open_clip:none/openai")


TIMM = """
    import torch
    def create_model(name, pretrained, num_classes):
        assert num_classes == 0
        made = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 8), torch.nn.Flatten())
        made.pretrained_cfg = {"classifier": "head"}
        made.pretrained = pretrained
        return made
"""
TIMM_DATA = """
    import torch
    def resolve_model_data_config(model):
        return {"input_size": (3, 8, 8)}
    def create_transform(input_size, is_training):
        assert not is_training
        return lambda image: torch.ones(input_size)
"""


def test_timm_with_its_own_weights_and_from_a_file(library, tmp_path):
    library("timm", __init__=TIMM, data=TIMM_DATA)
    coder = encoder("timm:small")
    assert (coder.name, coder.width, coder._forward.pretrained) == ("timm:small", 5, True)
    weights = {"0.weight": torch.ones(5, 3, 8, 8), "0.bias": torch.zeros(5)}
    save_file(weights | {"head.weight": torch.ones(2, 5)}, tmp_path / "w.safetensors")
    torch.save({"state_dict": weights}, tmp_path / "w.pth")
    for name in ("w.safetensors", "w.pth"):
        coder = encoder(f"timm:small@{tmp_path / name}")
        assert coder.name == f"timm:small@{name}"
        assert not coder._forward.pretrained
        assert coder.encode([coder.prepare(None)]).tolist() == [[192.0] * 5]


def test_the_file_is_named_after_the_weights_not_after_their_place(
    library, tmp_path, monkeypatch, capsys
):
    library("timm", __init__=TIMM, data=TIMM_DATA)
    weights = tmp_path / "deep/down/w.safetensors"
    weights.parent.mkdir(parents=True)
    save_file({"0.weight": torch.ones(5, 3, 8, 8), "0.bias": torch.zeros(5)}, weights)
    command = ["generated-images", "--encoder", f"timm:small@{weights}", "--pca", "3"]
    monkeypatch.setattr(sys, "argv", ["fissile", "embed", *command, "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "rows of 3 features" in capsys.readouterr().out
    assert (tmp_path / "generated-images-timm-small-w.safetensors-5-pca3.safetensors").is_file()


class Hostile:
    def __reduce__(self):
        return (print, ("this was run",))


def test_weights_that_do_not_fit_or_are_no_weights(library, tmp_path, capsys):
    library("timm", __init__=TIMM, data=TIMM_DATA)
    save_file({"0.weight": torch.ones(5, 3, 8, 8)}, tmp_path / "few.safetensors")
    save_file({"0.weight": torch.ones(1)}, tmp_path / "small.safetensors")
    good = {"0.weight": torch.ones(5, 3, 8, 8), "0.bias": torch.zeros(5)}
    save_file(good | {"1.weight": torch.ones(1)}, tmp_path / "many.safetensors")
    torch.save({"state_dict": Hostile()}, tmp_path / "hostile.pt")
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    (tmp_path / "empty.pt").touch()
    for name, message in {
        "few.safetensors": "'0.bias' is only in one of them",
        "many.safetensors": "'1.weight' is only in one of them",
        "small.safetensors": "do not fit the encoder: .*shape",
        "hostile.pt": "no weights that can be read safely",
        "torn.safetensors": "no weights that can be read safely",
        "empty.pt": "no weights that can be read safely",
        "missing.pt": "is not there",
    }.items():
        with pytest.raises(FileError, match=f"(?s){message}"):
            encoder(f"timm:small@{tmp_path / name}")
    assert "this was run" not in capsys.readouterr().out
