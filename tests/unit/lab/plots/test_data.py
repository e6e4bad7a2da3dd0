"""The numbers beside a figure, and its files, which never change."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pandas
import pytest
from fake_figures import Figures, frame_of, pictures_of
from matplotlib.figure import Figure

from fissile._common.errors import FileError
from fissile.lab.frame import cells, pick
from fissile.lab.plots import draw, numbers, save
from fissile.lab.stats import line
from fissile.lab.studies import STUDIES
from fissile.lab.study import Heat, Lines, Matrices, Series


@pytest.fixture(scope="module")
def drawn() -> dict[str, Figure]:
    return Figures()


# --- numbers


@pytest.mark.parametrize("name", ["codes", "superposition", "embed-neurons", "theory"])
def test_the_numbers_are_those_of_the_figure(name: str) -> None:
    study = STUDIES[name]
    frame = frame_of(study)
    found = numbers(study, frame)
    for down, row in enumerate(study.figure, 1):
        for across, panel in enumerate(row, 1):
            mine = found[found["panel"] == f"{down}.{across}"]
            if isinstance(panel, Matrices):
                assert not len(mine)
            elif isinstance(panel, Series):
                assert set(mine["measure"]) == set(panel.measures)
            elif isinstance(panel, Lines):
                part = cells(pick(frame, panel.where), panel.measure, [panel.along])
                assert_equal(mine, part[part["arm"].isin(panel.arms)], [panel.along])
            elif isinstance(panel, Heat):
                part = cells(frame, panel.measure, [panel.down, panel.across])
                assert_equal(mine, part[part["arm"] == panel.arm], [panel.down, panel.across])


def assert_equal(found: pandas.DataFrame, part: pandas.DataFrame, along: list[str]) -> None:
    assert len(part)
    for column in (*along, "arm", "mean", "error", "count"):
        assert found[column].tolist() == part[column].tolist()
    assert found["p"].tolist() == pytest.approx(part["p"].tolist(), nan_ok=True)


def test_fits_are_rows_of_the_numbers() -> None:
    found = numbers(STUDIES["interference"], frame_of(STUDIES["interference"]))
    part = found[found["panel"] == "1.3"]
    fits = part[part["measure"] == "improvement ~ capacity_fold"].set_index("arm")
    for arm in fits.index:
        one = part[part["arm"] == arm].set_index("measure")["mean"]
        fit = line(one["capacity_fold"], one["improvement"])
        row = fits.loc[arm]
        assert [row["slope"], row["intercept"], row["r2"], row["p"]] == pytest.approx(
            [fit.slope, fit.intercept, fit.r2, fit.p]
        )
        assert row["count"] == fit.count == 4


def test_the_numbers_are_a_plain_csv_file(tmp_path: Path) -> None:
    study = STUDIES["interference"]
    numbers(study, frame_of(study)).to_csv(tmp_path / "numbers.csv", index=False)
    head, first, *_ = (tmp_path / "numbers.csv").read_text().splitlines()
    assert head == ("panel,title,measure,arm,clauses,neurons,mean,error,count,p,slope,intercept,r2")
    assert first.startswith("1.1,(a) 8 clauses,capacity_fold,clause-2,8,4,")


# --- files


@pytest.mark.slow
def test_files_are_what_they_are_called_and_never_change(tmp_path: Path, drawn) -> None:
    study = STUDIES["codes"]
    again = draw(study, frame_of(study), pictures_of(study))
    saved = []
    for folder, figure in (("first", drawn["codes"]), ("second/below", again)):
        paths = save(figure, tmp_path / folder, "codes")
        assert [path.name for path in paths] == ["codes.svg", "codes.png"]
        assert sorted((tmp_path / folder).iterdir()) == sorted(paths)
        saved.append([path.read_bytes() for path in paths])
    svg, png = saved[0]
    assert saved[1] == [svg, png]
    assert svg.startswith(b"<?xml")
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert b"<text" not in svg  # letters are outlines
    assert not re.search(rb"<dc:date>|CreationDate|ModDate|tIME", svg + png)


def test_saving_again_replaces_the_files_with_the_same(tmp_path: Path, drawn) -> None:
    first = [path.read_bytes() for path in save(drawn["capacity"], tmp_path, "capacity")]
    second = [path.read_bytes() for path in save(drawn["capacity"], tmp_path, "capacity")]
    assert first == second
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_is_one_clear_error_and_costs_nothing(tmp_path, drawn, monkeypatch) -> None:
    (old,) = [path for path in save(drawn["capacity"], tmp_path, "old") if path.suffix == ".png"]
    before = old.read_bytes()
    real, calls = Figure.savefig, []

    def full(figure: Figure, path: Path, **options: object) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"a part")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(FileError, match=r"could not write the figure 'old'.*No space left"):
        save(drawn["theory"], tmp_path, "old")
    assert len(list(tmp_path.iterdir())) == 2
    assert old.read_bytes() == before


def test_a_folder_that_cannot_be_is_one_clear_error(tmp_path: Path, drawn) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FileError, match="choose another folder"):
            save(drawn["capacity"], folder, "capacity")
