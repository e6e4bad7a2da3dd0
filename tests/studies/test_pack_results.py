"""What the documentation says of packing is what the result files hold."""

import json
import re
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
    return (ROOT / "docs" / "parts" / name).read_text("utf-8")


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


LARGE = ["4096x4096", "14336x4096", "28672x8192"]


def few_samples(name):
    """Return the first layers of a run of pack.py that are large, with up to 16 samples."""
    rows = pandas.DataFrame(read(name)["rows"])
    return rows[rows["size"].isin(LARGE) & (rows.part == "W1") & (rows.batch <= 16)]


def test_what_the_page_says_of_large_layers_on_a_gpu():
    runs = [few_samples(f"pack-{name}h200.json") for name in ("", "large-", "eight-")]
    every = pandas.concat(runs)
    packed = every[every.rival == "inline"]
    small, widest = (packed[packed["size"] == size] for size in (LARGE[0], LARGE[2]))
    ratios = packed.groupby(["alpha", "batch"]).replayed_ratio
    most = ratios.max().round(2)
    assert most.loc[2].max() == 1.01
    assert most.loc[4, :8].max() <= 1.05
    *others, last = sorted(ratios.get_group((4, 16)))
    assert round(others[-1], 2) == 1.05
    assert last == 1.075
    assert len(others) == 11
    assert most.loc[8, [1, 4]].max() == 1.04
    eight = packed[(packed.alpha == 8) & (packed.batch == 8)]
    assert eight[eight["size"] != LARGE[2]].replayed_ratio.max().round(2) == 0.97
    widest = widest[(widest.alpha == 8) & (widest.batch == 8)].replayed_ratio
    assert [round(widest.min(), 2), widest.max()] == [1.03, 1.055]
    sixteen = small[(small.alpha == 8) & (small.batch == 16)].replayed_ratio
    assert [round(f(sixteen), 2) for f in (min, max)] == [1.04, 1.06]
    assert most.loc[8, 16] == 1.57
    dense = every[(every.rival == "dense") & (every["size"] == LARGE[2])].replayed
    assert [round(dense.min()), round(dense.max())] == [121, 134]
    eager = [run[(run.rival == "inline") & (run["size"] == LARGE[0])].ratio.max() for run in runs]
    assert [round(ratio, 1) for ratio in eager] == [1.9, 3.6, 1.1]


def test_what_the_page_says_of_the_roofline():
    cases = read("pack-rule-h200.json")["cases"]
    found = {}
    for line in page("pack-roofline.md").splitlines()[2:]:
        size, alpha, batch, *times, ratio = (cell.strip() for cell in line.strip("| ").split("|"))
        memory, instructions, took, dense = (float(time.removesuffix(" µs")) for time in times)
        assert took == pytest.approx(cases[f"{size}, {alpha}, {batch}"]["tiles"][0][0], abs=0.051)
        assert dense == pytest.approx(least_dense(cases, size, batch), abs=0.051)
        assert float(ratio) == pytest.approx(took / dense, abs=0.02)
        found[size, int(alpha), int(batch)] = memory, instructions, dense, float(ratio)
    eight = {"4096x4096": 0.92, "14336x4096": 1.05, "28672x8192": 1.13}
    for (size, alpha, batch), (memory, instructions, dense, ratio) in found.items():
        if alpha == 4 or batch <= 4:
            assert instructions < 0.8 * memory
        elif batch == 8:
            assert 0.76 <= round(instructions / memory, 2) <= 0.78
            assert ratio == eight[size]
        elif size != "4096x4096":
            assert round(instructions / dense, 1) == 1.1


def test_what_the_page_says_of_the_other_gpu():
    cases, other = (read(f"pack-rule-h200{name}.json")["cases"] for name in ("", "-b"))
    dense = [round(least_dense(found, "28672x8192", 8)) for found in (cases, other)]
    assert dense == [108, 119]
    took = [other[f"{size}, 8, 8"]["tiles"][0][0] / least_dense(other, size, 8) for size in LARGE]
    assert [round(ratio, 2) for ratio in took[1:]] == [1.01, 1.02]
    packed = [found["28672x8192, 8, 8"]["tiles"][0][0] for found in (cases, other)]
    assert [round(time) for time in packed] == [122, 122]


def least_dense(cases, size, batch):
    return min(time for alpha in (2, 4, 8) for time in cases[f"{size}, {alpha}, {batch}"]["dense"])


def cycles_of(kind, name):
    """Return cycles by the number of warps, 1 to 4."""
    lines = (RESULTS / f"2026-11-16-pack-{kind}-h200.txt").read_text("utf-8").splitlines()
    line = next(line for line in lines if line.startswith(f"{name}  "))
    return [float(text) for text in re.findall(r"warps: +([\d.]+)", line)]


def test_what_the_page_says_of_the_bare_loop():
    one, two, _, four = cycles_of("cycles", "flips + 8 products")
    assert [round(four), round(two), round(one)] == [98, 109, 152]
    one, two, _, four = cycles_of("overlap", "a layer of 8 children, 8 samples")
    assert [round(four), round(two), round(one)] == [90, 97, 110]
    cycles = cycles_of("cycles", "flips + 16 products")[3]
    assert round(cycles) == 138
    for name, wanted in (("", [1.10, 1.18]), ("-b", [1.03, 1.10])):
        cases, ratios = read(f"pack-rule-h200{name}.json")["cases"], []
        for h, d in [(14336, 4096), (28672, 8192)]:
            took = h * d / 256 / (132 * 4) * cycles / 1780  # microseconds, at 1.78 GHz
            ratios.append(round(took / least_dense(cases, f"{h}x{d}", 16), 2))
        assert ratios == wanted


def test_what_the_page_says_of_products_beside_others():
    for name, alone, each in [("8 products", 49, 5), ("8 sparse products", 66, 8)]:
        assert round(cycles_of("overlap", name)[3]) == alone
        for many in (24, 40):  # never less than so many for a product, and one for each other
            assert cycles_of("overlap", f"{name}, {many} mixed")[3] >= 8 * each + many - 0.05
    assert cycles_of("overlap", "8 products, 40 logic")[3] > 80


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
    assert [few[8].min(), few[8].max(), large[8].max()] == [1.04, 1.09, 1.87]
    assert sorted(at(large, 8)[8]) == [1.27, 1.28]
    small = slower_for_seconds(found, LARGE[:1])[0].droplevel("size")
    assert (small.loc[[1, 4]] <= 1).all(axis=None)
    assert (small.loc[8] > 1).to_dict() == {1: False, 2: False, 4: False, 8: True}
    assert (small.loc[16] > 1).to_dict() == {1: False, 2: False, 4: True, 8: True}
    other = pandas.DataFrame(read("pack-sustained-h200-a.json")["rows"])
    large, few = slower_for_seconds(other.set_index(["size", "batch", "alpha"]), LARGE[1:])
    assert [large[2].max(), few[4].max(), large[4].max()] == [1.06, 1.07, 1.29]
    assert [few[8].min(), few[8].max(), large[8].max()] == [1.09, 1.13, 1.89]


def slower_for_seconds(found, sizes):
    """Return times over the dense layer's by size, batch and alpha; and of 1 and 4 samples."""
    over = found.sustained.unstack("alpha")
    over = over.div(over[1], axis=0).round(2).loc[sizes]
    return over, over[over.index.get_level_values("batch") <= 4]


def at(table, batch):
    return table.xs(batch, level="batch")
