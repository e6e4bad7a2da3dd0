"""What the page says of foretelling is what was measured, by the criterion that was set."""

import importlib.util
from pathlib import Path

import pytest
import torch

import fissile
from fissile.lab.studies import STUDIES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page():
    path = ROOT / "docs" / "scripts" / "foretell.py"
    spec = importlib.util.spec_from_file_location("foretell_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_the_results(page):
    shown = (ROOT / "docs" / "foretell.md").read_text("utf-8")
    for name, make in page.FILES.items():
        assert make() == (page.PARTS / f"{name}.md").read_text("utf-8"), "docs/scripts/foretell.py"
        assert f"<!-- include: docs/parts/{name}.md -->" in shown


def test_diagnose_says_what_the_study_found(page):
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    note = fissile.diagnose(fissile.MLP([4, 3, 3]), (x, y)).note
    criterion = STUDIES["foretell"].claims[0].check
    assert criterion.measures == ("load", "before_means")
    found = criterion(page.wide("foretell"))
    assert ("does not foretell" in note) is (found.status == "fails")
