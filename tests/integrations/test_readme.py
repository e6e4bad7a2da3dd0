"""The README's examples, run as they stand."""

import re
from pathlib import Path

import pytest
import torch

import fissile

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)


def test_there_are_two_examples():
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x = torch.rand(64, 32)
    y = (x[:, 0] > 0.5).long()
    names = {"x": x, "y": y, "x_test": x, "y_test": y}
    exec(compile(EXAMPLES[number], "README.md", "exec"), names)
    out = capsys.readouterr().out
    if number == 0:
        assert "7,940 non-zero weights" in out
        assert fissile.nonzeros(names["wide"]).weights == 7940
    else:
        assert "tensor([" in out


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(fissile.FissileError, match=r"pip install 'fissile\[files\]'"):
        fissile.save(fissile.MLP([4, 3, 1]), tmp_path / "m")
    with pytest.raises(fissile.FissileError, match=r"pip install 'fissile\[bank\]'"):
        fissile.bank.Bank(
            [
                fissile.bank.Spec(
                    [4, 3, 1], fissile.bank.Data(*[torch.zeros(2, 4), torch.zeros(2).long()] * 2)
                )
            ]
        ).train(until=1, progress=True)
