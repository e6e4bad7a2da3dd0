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
    folder = ROOT / "docs" if name == "packing-speed.md" else ROOT / "docs" / "parts"
    return (folder / name).read_text("utf-8")


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
    ours = pandas.DataFrame(json.loads(json.dumps(statistics)))
    kept = pandas.DataFrame(result["summary"])  # sums differ in the last digit by processor
    pandas.testing.assert_frame_equal(ours, kept, rtol=1e-9)
    # What the README says of files: every network, every dtype.
    wide = frame[(frame.alpha > 1) & (frame.layout == "inline")]
    keys = ["study", "neurons", "trial", "dtype"]
    dense = frame[(frame.alpha == 1) & (frame.layout == "unpacked")].set_index(keys)["file"]
    ratios = wide.set_index(keys)["file"] / dense.reindex(wide.set_index(keys).index)
    assert len(ratios) == 3 * 220
    assert ratios.max() < 1.01


LARGE = ["4096x4096", "14336x4096", "28672x8192"]


def few_samples(name):
    """Return the first layers of a run of pack.py that are large, with up to 16 samples."""
    rows = pandas.DataFrame(read(name)["rows"])
    return rows[rows["size"].isin(LARGE) & (rows.part == "W1") & (rows.batch <= 16)]


def test_what_the_page_says_of_large_layers_on_a_gpu():
    runs = [few_samples(f"pack-{name}h200.json") for name in ("", "large-")]
    every = pandas.concat(runs)
    packed = every[(every.rival == "inline") & every.ratio.notna()]
    small = packed[packed["size"] == LARGE[0]]
    ratios = packed.groupby(["alpha", "batch"]).replayed_ratio
    most = ratios.max().round(2)
    assert most.loc[2].max() == 1.01
    assert most.loc[4, :8].max() <= 1.05
    *others, last = sorted(ratios.get_group((4, 16)))
    assert round(others[-1], 2) == 1.05
    assert last == 1.075
    assert len(others) == 11
    assert set(packed[packed.alpha == 8].batch) == {16}
    sixteen = small[(small.alpha == 8) & (small.batch == 16)].replayed_ratio
    assert [round(f(sixteen), 2) for f in (min, max)] == [1.04, 1.06]
    assert most.loc[8, 16] == 1.57
    dense = every[(every.rival == "dense") & (every["size"] == LARGE[2])].replayed
    assert [round(dense.min()), round(dense.max())] == [121, 134]
    eager = [run[(run.rival == "inline") & (run["size"] == LARGE[0])].ratio.max() for run in runs]
    assert [round(ratio, 1) for ratio in eager] == [1.9, 2.5]


def test_what_the_page_says_of_eight_children():
    rows = pandas.DataFrame(read("pack-eight-h200.json")["rows"])
    packed = rows[rows.rival == "inline"].set_index(["size", "batch", "dtype"])
    packed = packed.replayed_ratio
    for size in LARGE:
        cells = [
            ", ".join(f"{packed[size, batch, dtype]:.2f}" for dtype in ("float16", "bfloat16"))
            for batch in (1, 4, 8, 16)
        ]
        assert f"| {size.replace('x', ' × ')} | {' | '.join(cells)} |" in page("packing-speed.md")


def test_what_the_page_says_of_the_other_gpu():
    both = (read(f"pack-rule-h200{name}.json")["cases"] for name in ("", "-b"))
    assert [round(least_dense(cases, "28672x8192", 8)) for cases in both] == [108, 119]


def least_dense(cases, size, batch):
    return min(time for alpha in (2, 4, 8) for time in cases[f"{size}, {alpha}, {batch}"]["dense"])


def test_what_the_page_says_of_seconds():
    from pack_sustained import table

    rows = read("pack-sustained-h200.json")["rows"]
    assert table(rows) == page("pack-sustained.md")
    found = pandas.DataFrame(rows).set_index(["size", "batch", "alpha"])
    dense = found.xs(1, level="alpha")
    assert dense.loc[LARGE[1:]].power_w.between(665, 700).all()
    large, few = slower_for_seconds(found, LARGE[1:])
    assert large[2].max() == 1.04
    assert [few[4].max(), at(large, 8)[4].max(), large[4].max()] == [1.02, 1.06, 1.27]
    assert large[8].max() == 1.87
    small = slower_for_seconds(found, LARGE[:1])[0].droplevel("size")
    assert (small.loc[[1, 4, 8], [2, 4]] <= 1).all(axis=None)
    assert (small.loc[16] > 1).to_dict() == {1: False, 2: False, 4: True, 8: True}
    other = pandas.DataFrame(read("pack-sustained-h200-a.json")["rows"])
    large, few = slower_for_seconds(other.set_index(["size", "batch", "alpha"]), LARGE[1:])
    assert [large[2].max(), few[4].max(), large[4].max()] == [1.06, 1.07, 1.29]
    assert large[8].max() == 1.89


def slower_for_seconds(found, sizes):
    """Return times over the dense layer's by size, batch and alpha; and of 1 and 4 samples."""
    over = found.sustained.unstack("alpha")
    over = over.div(over[1], axis=0).round(2).loc[sizes]
    return over, over[over.index.get_level_values("batch") <= 4]


def at(table, batch):
    return table.xs(batch, level="batch")
