"""Exports: what another runtime computes is what PyTorch computes."""

import copy
import io
import os

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import fissile
from fissile.integrations import export
from fissile.integrations.export import check_answers, to_onnx


def expanded(**options):
    torch.manual_seed(0)
    return fissile.expand(fissile.MLP([12, 6, 5, 3], layer_norm=True), 2, **options)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = fissile.expand(fissile.MLP([8, 4, 2]), 2)

    def forward(self, left, right):
        out = self.body(torch.cat([left, right], -1))
        return {"logits": out, "left": out.sum(-1)}


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 6), nn.Linear(8, 6)
        self.down = nn.Linear(6, 3)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Undecided(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


def answers(path, **inputs):
    session = onnxruntime.InferenceSession(path)
    return [torch.from_numpy(one) for one in session.run(None, inputs)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model, in which modes its modules were before the export, and the file."""
    path = tmp_path_factory.mktemp("onnx") / "wide.onnx"
    wide = expanded().train()
    wide.layers[0].eval()  # a mixture of modes, to be left as it is
    before = [module.training for module in wide.modules()]
    to_onnx(wide, path, torch.rand(3, 12))
    return wide, before, path


def test_an_expanded_model_answers_alike_for_any_number_of_rows(exported):
    wide, before, path = exported
    assert os.listdir(path.parent) == ["wide.onnx"]
    assert [module.training for module in wide.modules()] == before
    for rows in (1, 3, 8):
        x = torch.rand(rows, 12)
        [found] = answers(path, x=x.numpy())
        torch.testing.assert_close(found, copy.deepcopy(wide).eval()(x).detach())


def test_the_file_is_plain_products_and_names_no_folder_of_this_machine(exported):
    path = exported[-1]
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count("Gemm") == 3
    assert not {"Where", "Equal", "Mul", "MatMul"} & set(kinds)
    stored = path.read_bytes()
    assert os.path.dirname(fissile.__file__).encode() not in stored
    assert os.path.dirname(torch.__file__).encode() not in stored


def test_a_masked_batch_normalised_sequential_with_a_batch_of_one(tmp_path):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2))
    dense(torch.rand(16, 8))  # running statistics other than the initial ones
    wide = fissile.expand(dense, 2, "overlapping")
    to_onnx(wide, tmp_path / "wide.onnx", torch.rand(1, 8))
    x = torch.rand(5, 8)
    [found] = answers(tmp_path / "wide.onnx", input=x.numpy())
    torch.testing.assert_close(found, wide.eval()(x).detach())


def test_filters_and_gated_neurons(tmp_path):
    torch.manual_seed(0)
    block = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3)
    image = torch.rand(2, 2, 8, 8)
    for model, inputs in ((nn.Sequential(*block), image), (Gated(), torch.rand(2, 8))):
        wide = fissile.expand(model, 2).eval()
        assert fissile.nonzeros(wide).weights == fissile.nonzeros(model).weights
        to_onnx(wide, tmp_path / "wide.onnx", inputs)  # which compares
        program = torch.export.export(wide, (inputs,))
        assert torch.equal(program.module()(inputs), wide(inputs))


def test_keyword_inputs_and_several_outputs(tmp_path):
    model = TwoInputs()
    inputs = {"right": torch.rand(2, 3), "left": torch.rand(2, 5)}
    to_onnx(model, tmp_path / "two.onnx", inputs)
    session = onnxruntime.InferenceSession(tmp_path / "two.onnx")
    assert [one.name for one in session.get_inputs()] == ["right", "left"]
    assert [one.name for one in session.get_outputs()] == ["logits", "left_output"]
    logits, total = answers(tmp_path / "two.onnx", **{k: v.numpy() for k, v in inputs.items()})
    expected = model(**inputs)
    torch.testing.assert_close(logits, expected["logits"].detach())
    torch.testing.assert_close(total, expected["left"].detach())


def test_a_fixed_batch_stays_fixed(tmp_path):
    to_onnx(expanded(), tmp_path / "wide.onnx", (torch.rand(3, 12),), dynamic_batch=False)
    with pytest.raises(Exception, match="invalid dimensions"):
        answers(tmp_path / "wide.onnx", x=torch.rand(4, 12).numpy())


def test_a_file_that_differs_is_an_error_and_not_left_there(tmp_path, monkeypatch):
    def off(model):
        plain = fissile.to_dense(model)
        with torch.no_grad():
            plain.layers[0].bias[0] += 0.5
        return plain

    monkeypatch.setattr(export, "to_dense", off)
    with pytest.raises(fissile.FissileError, match=r"differ from PyTorch's; .* difference: 0\."):
        to_onnx(expanded(), tmp_path / "wide.onnx", torch.rand(3, 12))
    assert os.listdir(tmp_path) == []
    to_onnx(expanded(), tmp_path / "wide.onnx", torch.rand(3, 12), check=False)
    assert os.listdir(tmp_path) == ["wide.onnx"]


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (torch.zeros(2), torch.zeros(2, 1), r"\[2, 1\]\) != torch.Size\(\[2\]\)"),
        (torch.tensor([INF, 1.0]), torch.tensor([INF, 2.0]), "difference: 1.0"),
        (torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0]), "difference: inf"),
        (torch.tensor([INF, 1.0]), torch.tensor([3.0, 1.0]), "difference: inf"),
        (torch.tensor([NAN, 1.0]), torch.tensor([0.0, 1.0]), "difference: nan"),
        (torch.tensor([0.0, 1.0]), torch.tensor([NAN, 1.0]), "difference: nan"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "Mismatched elements: 1 / 2"),
        (torch.tensor([70000]), torch.tensor([70001]), "difference: 1"),
    ],
)
def test_answers_that_differ(ours, theirs, message):
    with pytest.raises(AssertionError, match=message):
        check_answers([ours], [theirs])
    check_answers([ours], [ours.clone()])
    with pytest.raises(AssertionError, match="2 tensors instead of 1"):
        check_answers([ours], [ours, ours])


def test_answers_within_rounding_are_the_same():
    far = torch.tensor([INF, -INF, NAN, 1000.0, 1e-9])
    check_answers([far], [far + torch.tensor([0, 0, 0, 0.5, 1e-3])])
    check_answers([torch.zeros(0)], [torch.zeros(0)])


class Odd(nn.Module):
    """Returns its input too, and what is not a finite number."""

    def __init__(self):
        super().__init__()
        self.body = fissile.expand(fissile.MLP([8, 4, 2]), 2)

    def forward(self, y, x):
        out = self.body(x)
        return out + y, x, out > 0, out.argmax(-1), -out.abs() / 0


@pytest.mark.parametrize("kind", [dict, list])
def test_inputs_that_are_returned_and_answers_of_other_kinds(tmp_path, kind):
    inputs = {"x": torch.rand(3, 8), "y": torch.rand(3, 2)}
    given = inputs if kind is dict else [inputs["y"], inputs["x"]]
    to_onnx(Odd(), tmp_path / "odd.onnx", given)  # which compares
    names = [node.name for node in onnxruntime.InferenceSession(tmp_path / "odd.onnx").get_inputs()]
    assert [name[0] for name in names] == (["x", "y"] if kind is dict else ["y", "x"])
    found = [node.name for node in onnx.load(tmp_path / "odd.onnx").graph.output]
    assert found == [f"output_{i}" for i in range(5)]


class Encoder(nn.Module):
    """Tokens and a mask go in, an answer with names comes out, as from a model of transformers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.body = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None].to(torch.float32)
        hidden = self.body(self.embedding(input_ids)) * mask
        return {"logits": hidden.sum(1) / mask.sum(1), "states": (hidden, [hidden[:, 0]])}


def tokens(rows, length):
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length // 2 + 1 :] = 0
    return {"input_ids": torch.randint(20, (rows, length)), "attention_mask": mask}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "encoder.onnx"
    torch.manual_seed(0)
    wide = fissile.expand(Encoder(), 2, where="body").eval()
    to_onnx(wide, path, tokens(1, 1))
    return wide, path


@pytest.mark.parametrize(("rows", "length"), [(1, 2), (1, 7), (3, 12)])
def test_tokens_of_any_length_in_batches_of_any_size(encoder, rows, length):
    wide, path = encoder
    given = tokens(rows, length)
    found = answers(path, **{name: one.numpy() for name, one in given.items()})
    torch.testing.assert_close(found[0], wide(**given)["logits"].detach())


def test_inputs_outputs_and_sizes_have_names_and_the_opset_is_stated(encoder):
    session = onnxruntime.InferenceSession(encoder[1])
    both = ["batch", "sequence"]
    shapes = {one.name: one.shape for one in session.get_inputs()}
    assert shapes == {"input_ids": both, "attention_mask": both}
    shapes = {one.name: one.shape for one in session.get_outputs()}
    assert shapes == {"logits": ["batch", 3], "states_0": [*both, 3], "states_1_0": ["batch", 3]}
    [opset] = onnx.load(encoder[1]).opset_import
    assert f"opset {opset.version} " in to_onnx.__doc__


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4), nn.Linear(4, 2)

    def forward(self, question, answer):
        return self.head(self.table(question).mean(1) + self.table(answer).mean(1))


def test_two_sequences_have_a_length_each(tmp_path):
    question, answer = torch.randint(20, (2, 5)), torch.randint(20, (2, 3))
    to_onnx(Pairs(), tmp_path / "pairs.onnx", (question, answer))
    session = onnxruntime.InferenceSession(tmp_path / "pairs.onnx")
    shapes = {one.name: one.shape for one in session.get_inputs()}
    assert shapes == {"question": ["batch", "sequence"], "answer": ["batch", "sequence_2"]}


class Columns(nn.Module):
    """Whole numbers in two dimensions that are no sequence."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4), nn.Linear(12, 2)

    def forward(self, kinds):
        return self.head(self.table(kinds).flatten(1))


def test_columns_that_are_no_sequence_stay_fixed_when_asked(tmp_path):
    kinds = torch.randint(20, (2, 3))
    with pytest.raises(fissile.FissileError, match="dynamic_sequence=False"):
        to_onnx(Columns(), tmp_path / "columns.onnx", kinds)
    to_onnx(Columns(), tmp_path / "columns.onnx", kinds, dynamic_sequence=False)
    [kinds] = onnxruntime.InferenceSession(tmp_path / "columns.onnx").get_inputs()
    assert kinds.shape == ["batch", 3]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x, scale, shift):
        return self.layer(x) * scale + shift


def test_a_fixed_batch_may_be_anything(tmp_path):
    inputs = torch.rand(3, 8), torch.tensor(2.0), torch.rand(1, 2)
    to_onnx(Scaled(), tmp_path / "scaled.onnx", inputs, dynamic_batch=False)
    with pytest.raises(fissile.FissileError, match=r"equally many rows.*dynamic_batch=False"):
        to_onnx(Scaled(), tmp_path / "free.onnx", inputs)
    assert os.listdir(tmp_path) == ["scaled.onnx"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["x"], "must be a tensor, a tuple"),
        ((), "must be a tensor, a tuple"),
        (torch.tensor(1.0), "equally many rows"),
        ((torch.rand(2, 12), torch.rand(3, 12)), "equally many rows"),
        (torch.rand(0, 12), "at least one"),
        ((torch.rand(2, 12), torch.rand(2, 12)), "does not take these example_inputs: .*forward"),
    ],
)
def test_inputs_that_are_none(tmp_path, inputs, message):
    with pytest.raises(fissile.FissileError, match=message):
        to_onnx(expanded(), tmp_path / "wide.onnx", inputs)


def test_a_wrong_width_is_one_line(tmp_path, capfd):
    with pytest.raises(fissile.FissileError, match=r"example_inputs: .*3x11 and 12x12") as caught:
        to_onnx(expanded(), tmp_path / "wide.onnx", torch.rand(3, 11))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_exported_is_said(tmp_path, capfd):
    with pytest.raises(fissile.FissileError, match=r"torch\.onnx cannot export this"):
        to_onnx(Undecided(), tmp_path / "model.onnx", torch.rand(2, 4))
    assert capfd.readouterr().err == ""
    with pytest.raises(fissile.FissileError, match=r"is torch\.bfloat16.*model\.float\(\)"):
        to_onnx(expanded().bfloat16(), tmp_path / "model.onnx", torch.rand(2, 12))
    with pytest.raises(fissile.FileError, match="nowhere is no folder"):
        to_onnx(expanded(), tmp_path / "nowhere" / "model.onnx", torch.rand(2, 12))
    with pytest.raises(fissile.FileError, match="is a folder; name the file"):
        to_onnx(expanded(), tmp_path, torch.rand(2, 12))
    assert os.listdir(tmp_path) == []


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(fissile.FissileError, match=r"pip install .*\[onnx\]'"):
        to_onnx(expanded(), tmp_path / "wide.onnx", torch.rand(2, 12))


@pytest.mark.parametrize("kind", ["partitioned", "masked"])
def test_torch_export_takes_expanded_models_as_they_are(kind):
    wide = expanded(split="gram").eval()
    wide = fissile.to_masked(wide) if kind == "masked" else wide
    free = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(wide, (torch.rand(3, 12),), dynamic_shapes=free)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    x = torch.rand(7, 12)
    assert torch.equal(loaded.module()(x), wide(x))
    # It is the sparse model that was stored: the owners or masks are there, no wide dense matrix.
    stored = loaded.state_dict
    assert stored.keys() == wide.state_dict().keys()
    assert all(torch.equal(stored[key], value) for key, value in wide.state_dict().items())
