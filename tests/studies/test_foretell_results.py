"""What the page says of foretelling is what was measured, by the criterion that was set."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

import fissile

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page():
    path = ROOT / "docs" / "scripts" / "foretell.py"
    spec = importlib.util.spec_from_file_location("foretell_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_the_results(page):
    shown = (ROOT / "docs" / "will-it-help.md").read_text("utf-8")
    for name, make in page.FILES.items():
        assert make() == (page.PARTS / f"{name}.md").read_text("utf-8"), "docs/scripts/foretell.py"
        assert f"<!-- include: docs/parts/{name}.md -->" in shown


def test_the_summary_follows_from_the_cells(page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pytest.importorskip("sklearn")
    import foretell as study

    found = page.read()
    again = study.summary(found["cells"])
    assert again["foretells"] == found["summary"]["foretells"]
    for name, one in again["left_out"].items():
        assert one == pytest.approx(found["summary"]["left_out"][name], rel=1e-6)


def test_a_line_that_foretells_is_recognised(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pytest.importorskip("sklearn")
    import foretell as study

    points = [
        {"set": name, "features": 10 * (s + 1), "neurons": n, "own": 0.1 * n, "gain": 0.0}
        for s, name in enumerate("abcd")
        for n in (2, 4, 8)
    ]
    for point in points:
        point["gain"] = 3 * math.log(point["features"] / point["neurons"]) - 2 * point["own"]
    assert study.left_out(points, study.BEFORE["load and capacity"])["r2"] == pytest.approx(1)
    for i, point in enumerate(points):
        point["gain"] = float((-1) ** i)
    assert study.left_out(points, study.BEFORE["load and capacity"])["r2"] < 0.5


def test_diagnose_says_what_the_study_found(page):
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    note = fissile.diagnose(fissile.MLP([4, 3, 3]), (x, y)).note
    assert ("does not foretell" in note) is not page.read()["summary"]["foretells"]
