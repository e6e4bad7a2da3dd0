import io
from pathlib import Path

import pytest
import torch
from lightning_models import EPOCHS, QUIET, Net, cached, every_epoch, fit, loader, trainer
from networks import same
from pytorch_lightning.callbacks import ModelCheckpoint

import fissile
from fissile._common.errors import FileError, FissileError
from fissile.integrations.lightning import ExpandAt, load

pytestmark = QUIET


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return cached(tmp_path_factory)


@pytest.mark.parametrize("weights_only", [False, True])
def test_load_reads_checkpoints_of_both_kinds(run, tmp_path, weights_only):
    keep = every_epoch(tmp_path, save_weights_only=weights_only)
    fit(tmp_path, Net(hidden=5), keep, ExpandAt(2, epoch=1), max_epochs=2)
    dense = load(Net, tmp_path / "epoch=0.ckpt")
    wide = load(Net, tmp_path / "epoch=1.ckpt")
    assert type(dense) is type(wide) is Net
    assert (dense.net[0].out_features, wide.net[0].out_features) == (5, 10)
    assert fissile.nonzeros(dense).weights == fissile.nonzeros(wide).weights
    stored = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, stored[key]) for key, value in wide.state_dict().items())


def test_validates_and_predicts_from_an_expanded_checkpoint(run, tmp_path):
    folder, whole = run("epoch", 2)
    last = folder / f"epoch={EPOCHS - 1}.ckpt"
    mine = trainer(tmp_path, ExpandAt(2, epoch=2))
    assert mine.validate(Net(seed=5), loader(), ckpt_path=last, verbose=False)
    found = torch.cat(mine.predict(Net(seed=5), loader(), ckpt_path=last))
    with torch.no_grad():
        assert torch.equal(found, torch.cat([whole.eval()(x) for x, _ in loader()]))


def test_a_checkpoint_from_before_needs_a_dense_module(run, tmp_path):
    folder, wide = run("epoch", 2)
    mine = trainer(tmp_path, ExpandAt(2, epoch=2))
    with pytest.raises(FissileError, match="from before the expansion"):
        mine.validate(wide, loader(), ckpt_path=folder / "epoch=1.ckpt", verbose=False)


def test_a_checkpoint_may_be_asked_for_after_the_run(tmp_path):
    module = Net()
    mine = fit(tmp_path, module, ExpandAt(2, epoch=1), max_epochs=2)
    mine.save_checkpoint(tmp_path / "after.ckpt", weights_only=True)
    assert same(load(Net, tmp_path / "after.ckpt"), module)


def test_the_users_own_hooks_are_called(tmp_path):
    class Told(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["own"] = sorted(checkpoint)

        def on_load_checkpoint(self, checkpoint):
            self.read = checkpoint["own"], self.net[0].out_features

    mine = fit(tmp_path, Told(), ExpandAt(2, epoch=0), max_epochs=1)
    mine.save_checkpoint(tmp_path / "own.ckpt")
    module = Told()
    trainer(tmp_path, ExpandAt(2, epoch=0)).validate(
        module, loader(), ckpt_path=tmp_path / "own.ckpt", verbose=False
    )
    for one in (module, load(Told, tmp_path / "own.ckpt")):
        assert "fissile" in one.read[0]
        assert one.read[1] == 12


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Checkpoints of a run without an expansion, after every step."""
    folder = tmp_path_factory.mktemp("dense")
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    fit(folder, Net(), keep, max_epochs=2)
    return folder


@pytest.mark.parametrize(
    ("when", "step"), [({"epoch": 0}, 3), ({"epoch": 0}, 2), ({"epoch": 1}, 5), ({"step": 3}, 4)]
)
def test_refuses_a_dense_checkpoint_from_after_the_moment(dense, tmp_path, when, step):
    module = Net()
    with pytest.raises(FissileError, match=r"(epoch|step) \d is over in this checkpoint"):
        fit(tmp_path, module, ExpandAt(2, **when), ckpt_path=dense / f"step={step}.ckpt")
    assert not module.rates


@pytest.mark.filterwarnings("ignore:.*checkpoint that ended before the epoch ended.*")
@pytest.mark.parametrize(("when", "step"), [({"epoch": 1}, 3), ({"epoch": 1}, 2), ({"step": 4}, 4)])
def test_a_dense_checkpoint_from_before_the_moment_will_do(dense, tmp_path, when, step):
    module = Net()
    fit(tmp_path, module, ExpandAt(2, **when), max_epochs=2, ckpt_path=dense / f"step={step}.ckpt")
    assert module.net[0].out_features == 12


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("a checkpoint was unpickled",))


def test_load_runs_nothing_that_a_checkpoint_says(run, tmp_path):
    folder, _ = run("epoch", 2)
    checkpoint = torch.load(folder / "epoch=3.ckpt", weights_only=True)
    torch.save(checkpoint | {"hyper_parameters": {"hidden": Trap()}}, tmp_path / "trap.ckpt")
    with pytest.raises(FileError, match=r"trap\.ckpt"):
        load(Net, tmp_path / "trap.ckpt")


@pytest.mark.parametrize(
    "damage",
    [
        {"layers": None},
        {"layers": {"net.9": {"kind": "masked", "inputs": 12, "outputs": 3}}},
        {"layers": {"net.0": {"kind": "partitioned", "inputs": 8, "outputs": 10**12, "alpha": 2}}},
        "layers",
    ],
)
def test_a_damaged_recipe_is_one_clear_error(run, tmp_path, damage):
    folder, _ = run("epoch", 2)
    checkpoint = torch.load(folder / "epoch=3.ckpt", weights_only=True)
    torch.save(checkpoint | {"fissile": damage}, tmp_path / "damaged.ckpt")
    with pytest.raises(FileError):
        load(Net, tmp_path / "damaged.ckpt")


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: stored[: len(stored) // 2],
        lambda stored: stored[:40],
        lambda stored: b"",
        lambda stored: b"hello, world\n" * 9,
        lambda stored: saved([1, 2]),
        lambda stored: saved({"state_dict": {}}),
        lambda stored: saved({"weights": torch.zeros(2)}),
    ],
)
def test_a_torn_or_foreign_file_is_one_clear_error(run, tmp_path, damage):
    folder, _ = run("epoch", 2)
    path = tmp_path / "odd.ckpt"
    path.write_bytes(damage((folder / "epoch=3.ckpt").read_bytes()))
    with pytest.raises(FileError, match=r"^\S*odd\.ckpt: not a checkpoint of Lightning"):
        load(Net, path)


def saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def test_load_names_what_it_does_not_read(run, tmp_path):
    folder, _ = run("epoch", 2)
    checkpoint = torch.load(folder / "epoch=3.ckpt", weights_only=True)
    checkpoint["hyper_parameters"] = {"hidden": Path("data")}
    torch.save(checkpoint, tmp_path / "path.ckpt")
    with pytest.raises(FileError, match=r"it holds a pathlib\.\S*PosixPath,") as caught:
        load(Net, tmp_path / "path.ckpt")
    assert str(caught.value).isprintable()


def test_load_takes_the_settings_of_load_from_checkpoint(run):
    folder, module = run("epoch", 2)
    last = folder / f"epoch={EPOCHS - 1}.ckpt"
    again = load(Net, last, weights_only=True, map_location="cpu", hidden=6)
    assert same(again, module)
    with pytest.raises(FissileError, match="leave weights_only out"):
        load(Net, last, weights_only=False)
    with pytest.raises(FileNotFoundError):
        load(Net, folder / "none.ckpt")
    with pytest.raises(RuntimeError, match="size mismatch"):  # the module's fault, not the file's
        load(Net, folder / "epoch=0.ckpt", hidden=5)
