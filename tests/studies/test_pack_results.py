"""What the documentation says of packing is what the result files hold."""

import json
from pathlib import Path

import pandas
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def read(name):
    return json.loads((RESULTS / name).read_text("utf-8"))


def page(name):
    return (ROOT / "docs" / name).read_text("utf-8")


def test_the_speeds_are_the_results():
    from pack_chart import summary, tables

    results = [read("pack-cpu.json"), read("pack-h200.json")]
    assert tables(results) == page("pack-speed.md")
    assert summary(results) == page("pack-summary.md")
    for result in results:
        assert result["kernels"]
        assert {row["alpha"] for row in result["rows"]} == {2, 4, 8}
        assert {row["batch"] for row in result["rows"]} == {1, 4, 16, 64, 256}


def test_the_accuracies_are_the_results():
    from pack_table import page as accuracies

    result = read("pack-accuracy.json")
    frame = pandas.DataFrame(result["rows"], columns=result["columns"])
    text, statistics = accuracies(frame, result)
    assert text == page("pack-table.md")
    assert json.loads(json.dumps(statistics)) == result["summary"]
    # What the README says of files: every network, every dtype.
    wide = frame[(frame.alpha > 1) & (frame.layout == "inline")]
    keys = ["study", "neurons", "trial", "dtype"]
    dense = frame[(frame.alpha == 1) & (frame.layout == "unpacked")].set_index(keys)["file"]
    ratios = wide.set_index(keys)["file"] / dense.reindex(wide.set_index(keys).index)
    assert len(ratios) == 3 * 220
    assert ratios.max() < 1.01
