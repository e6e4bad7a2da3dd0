"""Saving and loading: the same model back, and one clear error for everything else."""

import json
import os
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import cases, same
from packed_models import parts
from safetensors.torch import save_file
from torch import nn

import fissile
from fissile import MLP, FileError, dropconnect, expand, load, nonzeros, save, to_masked
from fissile.io import packing
from fissile.layers import mlp
from fissile.packed.files import checksum, sealed


@settings(max_examples=30, deadline=None)
@given(case=cases(plain=False))
def test_an_mlp_comes_back_without_any_code(case, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    wide = expand(case.model, case.alpha, case.split)
    save(wide, path)
    back = load(path)
    assert same(back, wide)
    assert nonzeros(back) == nonzeros(wide)
    assert all(p.requires_grad for p in back.parameters())
    x = torch.randn(3, wide.sizes[0]).to(next(wide.parameters()).dtype)
    # Equal weights elsewhere in memory may be summed in another order.
    torch.testing.assert_close(back.eval()(x), wide.eval()(x))


@settings(max_examples=30, deadline=None)
@given(case=cases(plain=True))
def test_another_model_is_filled(case, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    wide = expand(case.model, case.alpha, case.split)
    save(wide, path)
    with pytest.raises(FileError, match=r"give load\(\) the model"):
        load(path)
    before = {k: v.clone() for k, v in case.model.state_dict().items()}
    assert same(load(path, case.model), wide)  # from the dense architecture
    assert same(load(path, expand(case.model, case.alpha, case.split, seed=9)), wide)
    assert all(torch.equal(before[k], v) for k, v in case.model.state_dict().items())


@pytest.mark.parametrize("make", [lambda m: m, lambda m: dropconnect(m, 2), to_masked])
def test_every_kind_of_layer_round_trips(make, tmp_path):
    model = make(MLP([8, 4, 4, 4, 2], layer_norm=True, activation=nn.PReLU(), embedding=6))
    save(model, tmp_path / "model")
    assert same(load(tmp_path / "model"), model)
    slopes = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.PReLU(3), nn.Linear(3, 2))
    wide = expand(slopes, 2)
    save(wide, tmp_path / "model")
    assert same(load(tmp_path / "model", slopes), wide)


def test_activation_settings_come_back(tmp_path):
    save(expand(MLP([6, 4, 2], activation=nn.LeakyReLU(0.37)), 2), tmp_path / "m")
    assert load(tmp_path / "m").layers[1].negative_slope == 0.37

    class Mine(nn.Module):
        def forward(self, x):
            return x.relu() + 1

    dense = MLP([6, 4, 2], activation=Mine())
    save(expand(dense, 2), tmp_path / "m")
    with pytest.raises(FileError, match=r"give load\(\) the model"):
        load(tmp_path / "m")
    assert load(tmp_path / "m", dense)(torch.randn(2, 6)).shape == (2, 2)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    save(expand(MLP([8, 4, 3], layer_norm=True), 2), path)
    return path


def rewrite(path, change):
    tensors, recipe = parts(path)
    change(tensors, recipe)
    recipe["crc32"] = checksum(tensors)
    save_file(tensors, path, {"fissile": sealed(json.dumps(recipe))})


HOSTILE = {
    "owner out of range": lambda t, r: t["layers.0.owner"].fill_(2),
    "owner below -1": lambda t, r: t["layers.0.owner"].fill_(-2),
    "owner of another shape": lambda t, r: t.update({"layers.0.owner": t["layers.0.owner"][:2]}),
    "owner of floats": lambda t, r: t.update({"layers.0.owner": t["layers.0.owner"].float()}),
    "mask of bytes": lambda t, r: t.update({"layers.3.mask": t["layers.3.mask"].byte()}),
    "mask of another shape": lambda t, r: t.update({"layers.3.mask": t["layers.3.mask"][:1]}),
    "bias of another shape": lambda t, r: t.update({"layers.0.bias": torch.zeros(3)}),
    "norm of another width": lambda t, r: t.update(
        {"layers.1.weight": torch.ones(5), "layers.1.bias": torch.ones(5)}
    ),
    "missing tensor": lambda t, r: t.pop("layers.3.bias"),
    "missing owner": lambda t, r: t.pop("layers.0.owner"),
    "extra tensor": lambda t, r: t.update({"layers.9.weight": torch.zeros(2)}),
    "alpha zero": lambda t, r: r["layers"]["layers.0"].update(alpha=0),
    "alpha a word": lambda t, r: r["layers"]["layers.0"].update(alpha="two"),
    "alpha huge": lambda t, r: r["layers"]["layers.0"].update(alpha=10**12),
    "inputs huge": lambda t, r: r["layers"]["layers.0"].update(inputs=10**12),
    "outputs huge": lambda t, r: r["layers"]["layers.3"].update(outputs=10**12),
    "inputs no number": lambda t, r: r["layers"]["layers.0"].update(inputs=[8]),
    "transposed": lambda t, r: r["layers"]["layers.0"].update(transposed=True),
    "convolution": lambda t, r: r["layers"]["layers.0"].update(kind="partitioned-conv"),
    "norm in the recipe huge": lambda t, r: r["norms"].update({"layers.1": 10**12}),
    "norm where none is": lambda t, r: r["norms"].update({"layers.0": 8}),
    "norms no table": lambda t, r: r.update(norms=[8]),
    "the model itself": lambda t, r: r["layers"].update({"": {"kind": "masked"}}),
    "unknown kind": lambda t, r: r["layers"]["layers.0"].update(kind="pickle"),
    "layer outside": lambda t, r: r["layers"].update({"no.such": {"kind": "masked"}}),
    "layer on a norm": lambda t, r: r["layers"].update({"layers.1": {"kind": "masked"}}),
    "sizes huge": lambda t, r: r["mlp"].update(sizes=[10**9, 10**9, 10**9]),
    "sizes no list": lambda t, r: r["mlp"].update(sizes="abc"),
    "unknown setting": lambda t, r: r["mlp"].update(run="rm -rf"),
    "unknown activation": lambda t, r: r["mlp"]["activation"].update(name="system"),
    "odd activation setting": lambda t, r: r["mlp"]["activation"].update(settings={"inplace": []}),
    "activation backwards": lambda t, r: r["mlp"]["activation"].update(
        name="hardtanh", settings={"min_val": 2.0, "max_val": 1.0}
    ),
    "slopes huge": lambda t, r: r["mlp"]["activation"].update(
        name="prelu", settings={"num_parameters": 10**12}
    ),
    "embedding expanded": lambda t, r: r["layers"].update(
        {"embedding": {"kind": "partitioned", "alpha": 3000}}
    ),
    "no layers": lambda t, r: r.pop("layers"),
    "half a pair": lambda t, r: r["layers"].pop("layers.0"),
    "a pair of others": lambda t, r: r["pairs"][0].update(firsts=["layers.1"]),
    "pairs no list": lambda t, r: r.update(pairs=3),
    "frozen a word": lambda t, r: r.update(frozen="layers.0.weight"),
    "frozen a number": lambda t, r: r.update(frozen=[1]),
    "frozen what is not there": lambda t, r: r.update(frozen=["layers.7.weight"]),
    "frozen a buffer": lambda t, r: r.update(frozen=["layers.0.owner"]),
    "layers no table": lambda t, r: r.update(layers=["layers.0"]),
    "layer no table": lambda t, r: r["layers"].update({"layers.0": 3}),
    "other version": lambda t, r: r.update(version=2),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(saved, name):
    rewrite(saved, HOSTILE[name])
    with pytest.raises(FileError, match=str(saved)):
        load(saved)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_torn_or_flipped_file_never_does_anything_else(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("torn") / "m"
    save(model := expand(MLP([8, 4, 3]), 2), path)
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
        path.write_bytes(whole)
        with pytest.raises(FileError):
            load(path)
        return
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    try:
        back = load(path)
    except FileError:
        return
    assert same(back, model), "a bit that counts is noticed"
    assert repr(back) == repr(model)


def test_a_number_with_too_many_digits(saved):
    tensors, recipe = parts(saved)
    text = json.dumps(recipe).replace('"version": 1', '"version": ' + "9" * 5000)
    save_file(tensors, saved, {"fissile": sealed(text)})
    with pytest.raises(FileError, match="recipe is damaged"):
        load(saved)


@pytest.mark.parametrize("name", sorted(mlp._ACTIVATIONS))
def test_every_activation_round_trips(name, tmp_path):
    wide = expand(MLP([6, 4, 2], activation=name), 2)
    save(wide, tmp_path / "m")
    x = torch.randn(3, 6)
    torch.testing.assert_close(load(tmp_path / "m").eval()(x), wide.eval()(x))


def test_an_edited_network_needs_its_model(tmp_path):
    for edit in (
        lambda m: m.layers.__setitem__(6, nn.Tanh()),
        lambda m: setattr(m.layers[1], "eps", 0.5),
        lambda m: setattr(m.layers[3], "p", 0.5),
    ):
        model = MLP([6, 4, 4, 2], layer_norm=True, dropout=0.1)
        edit(model)
        save(model, tmp_path / "m")
        with pytest.raises(FileError, match=r"give load\(\) the model"):
            load(tmp_path / "m")
        assert same(load(tmp_path / "m", model), model)


def test_what_did_not_learn_does_not_learn(tmp_path):
    wide = expand(MLP([6, 4, 2]), 2)
    wide.layers[0].requires_grad_(False)
    save(wide, tmp_path / "m")
    frozen = {name for name, p in load(tmp_path / "m").named_parameters() if not p.requires_grad}
    assert frozen == {"layers.0.weight", "layers.0.bias"}
    given = load(tmp_path / "m", MLP([6, 4, 2]))
    assert all(p.requires_grad for p in given.parameters()), "a given model says what learns"


def test_sizes_may_be_numpy_numbers(tmp_path):
    save(MLP(np.array([6, 4, 2]), embedding=np.int64(5)), tmp_path / "m")
    assert load(tmp_path / "m").sizes == (6, 4, 2)


def test_foreign_files(tmp_path):
    path = tmp_path / "m"
    with pytest.raises(FileError, match=r"m: No such file or directory; give another$"):
        load(path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(FileError, match="not a fissile file"):
        load(path)
    save_file({"a": torch.zeros(2)}, path, {"fissile": sealed("{")})
    with pytest.raises(FileError, match="recipe is damaged"):
        load(path)
    save_file({"a": torch.zeros(2)}, path, {"fissile": sealed("[" * 100_000)})
    with pytest.raises(FileError, match="recipe is damaged"):
        load(path)
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(FileError, match="not a readable safetensors file"):
        load(path)


def test_a_pickle_is_never_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    (tmp_path / "m").write_bytes(pickle.dumps(Trap()))
    torch.save({"x": Trap()}, tmp_path / "n")
    for name in ("m", "n"):
        with pytest.raises(FileError):
            load(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_a_model_that_does_not_fit_is_refused(saved):
    others = [MLP([8, 4, 2]), MLP([8, 4, 3]), nn.Sequential(nn.Linear(8, 4))]
    others += [MLP([16, 4, 3], layer_norm=True), MLP([8, 16, 3], layer_norm=True)]
    for other in others:
        with pytest.raises(FileError):
            load(saved, other)
    save(expand(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), 2), saved)
    with pytest.raises(FileError, match="maps"):
        load(saved, nn.Sequential(nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 77)))


def test_a_model_as_wide_as_it_became_is_filled_too(saved):
    wide = load(saved)
    assert same(load(saved, MLP([8, 8, 3], layer_norm=True)), wide)
    assert same(load(saved, MLP([8, 4, 3], layer_norm=True)), wide)


def test_a_failed_write_keeps_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(FileError, match="No space left"):
        save(MLP([8, 4, 3]), saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved], "a half-written file was left behind"


def test_a_really_full_disk_keeps_the_old_file(saved):
    """Writes under a file size limit of the operating system, in a process of its own."""
    before = saved.read_bytes()
    code = (
        "import resource, signal, sys, fissile;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try: fissile.save(fissile.MLP([512, 256, 3]), sys.argv[1])\n"
        "except fissile.FileError as error: print('refused:', error)"
    )
    run = subprocess.run([sys.executable, "-c", code, saved], capture_output=True, text=True)
    assert run.stdout.startswith("refused: could not write"), run
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_nowhere_to_write(tmp_path):
    with pytest.raises(FileError, match="could not write"):
        save(MLP([8, 4, 3]), tmp_path / "no" / "such" / "folder")


def test_state_that_is_no_tensor_is_refused(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(FileError, match="not a tensor"):
        save(nn.Sequential(Odd(2, 2)), tmp_path / "m")


def test_loading_onto_a_device_and_dtype(saved):
    assert next(load(saved, device="meta").parameters()).device.type == "meta"
    dense = MLP([8, 4, 3], layer_norm=True).double()
    assert next(fissile.load(saved, dense).parameters()).dtype is torch.float64


# ---- checksums and bounds


@pytest.mark.parametrize("make", [lambda m: m, lambda m: expand(m, 2), to_masked])
def test_other_numbers_than_those_written_are_refused(make, tmp_path):
    save(make(MLP([8, 4, 3])), tmp_path / "m")
    data = bytearray((tmp_path / "m").read_bytes())
    data[-2] ^= 1
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(FileError, match=r"m: the tensors are not .* their checksum differs"):
        load(tmp_path / "m")


def test_a_recipe_without_a_checksum_is_refused(saved):
    tensors, recipe = parts(saved)
    for text in (json.dumps(recipe), sealed(json.dumps({**recipe, "crc32": None}))):
        save_file(tensors, saved, {"fissile": text})
        with pytest.raises(FileError, match="checksum differs"):
            load(saved)


def test_no_mlp_of_more_layers_than_the_file_is_built(tmp_path, monkeypatch):
    save(MLP([6, 4, 2], embedding=3), tmp_path / "m")
    monkeypatch.setattr(MLP, "__init__", lambda *_, **__: pytest.fail("it was built"))
    for change, message in (
        ({"sizes": [1] * 1000}, "a layer of 1 neurons, and the file has not"),
        ({"sizes": [6, 3, 2]}, "a layer of 3 neurons, and the file has not"),
        ({"sizes": [6, -4, 2]}, "a layer of -4 neurons, and the file has not"),
        ({"sizes": [6, 4.0, 2]}, r"a layer of 4.0 neurons, and the file has not"),
        ({"sizes": [2**64, 4, 2]}, "18446744073709551616 inputs, more than the file can be for"),
        ({"embedding": 2**64}, "more than the file can be for"),
    ):
        rewrite(tmp_path / "m", lambda _, recipe, new=change: recipe["mlp"].update(new))
        with pytest.raises(FileError, match=message):
            load(tmp_path / "m")
        rewrite(tmp_path / "m", lambda _, r: r["mlp"].update(sizes=[6, 4, 2], embedding=3))


def test_a_number_that_is_none_is_neither_written_nor_read(tmp_path):
    save(MLP([6, 4, 2], activation=nn.Hardtanh(-1.0, float("inf"))), tmp_path / "m")
    assert load(tmp_path / "m").layers[1].max_val == float("inf")
    slope = MLP([6, 4, 2], activation=nn.LeakyReLU(float("nan")))
    with pytest.raises(FileError, match=r"could not write .*: a number in it is NaN"):
        save(slope, tmp_path / "slope")
    assert not (tmp_path / "slope").exists()
    save(MLP([6, 4, 2], activation="leakyrelu"), tmp_path / "m")
    settings = {"negative_slope": float("nan"), "inplace": False}
    rewrite(tmp_path / "m", lambda _, r: r["mlp"]["activation"].update(settings=settings))
    with pytest.raises(FileError, match="recipe is damaged: a number in it is NaN"):
        load(tmp_path / "m")


def test_a_recipe_that_is_too_long_is_neither_written_nor_read(tmp_path, monkeypatch):
    save(MLP([6, 4, 2]), tmp_path / "m")
    monkeypatch.setattr("fissile.packed.files.LONGEST", 100)
    with pytest.raises(FileError, match="recipe is damaged: it has more than 100 characters"):
        load(tmp_path / "m")
    with pytest.raises(FileError, match=r"could not write .*: it has more than 100 characters"):
        save(MLP([6, 4, 2]), tmp_path / "n")


def test_names_are_plain_text(saved, tmp_path):
    odd = nn.Module()
    odd.add_module("\x1b[2J", nn.Linear(2, 2))
    with pytest.raises(FileError, match="is no plain text; rename it"):
        save(odd, tmp_path / "odd")
    rewrite(saved, lambda tensors, _: tensors.update({"\x1b[2J": torch.zeros(1)}))
    with pytest.raises(FileError, match="is no plain text; rename it") as refused:
        load(saved)
    assert str(refused.value).isprintable()


def test_sizes_that_torch_cannot_hold_are_one_line(saved):
    rewrite(saved, lambda _, recipe: recipe["layers"]["layers.0"].update(inputs=2**64))
    for read in (load, packing.read):
        with pytest.raises(FileError) as refused:
            read(saved)
        assert "frame #" not in str(refused.value)
        assert len(str(refused.value)) < 500


def test_a_name_of_many_parts_is_refused(tmp_path):
    wide = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    save(expand(wide, 2), tmp_path / "m")

    def change(tensors, recipe):
        far = "a." * 70_000 + "0"
        recipe["layers"][far] = recipe["layers"].pop("0")
        for key in ("weight", "bias", "owner"):
            tensors[f"{far}.{key}"] = tensors.pop(f"0.{key}")

    rewrite(tmp_path / "m", change)
    with pytest.raises(FileError, match="names have more than 65,536 parts in all"):
        packing.read(tmp_path / "m")
