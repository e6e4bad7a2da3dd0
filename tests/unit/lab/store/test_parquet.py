"""Trials in Parquet files: what one store writes, another takes over; nothing that is damaged."""

import io
import json
from dataclasses import asdict, replace

import pyarrow
import pytest
from command import called
from fake_stores import HERE, filled, keys, outcomes
from pyarrow import parquet

from fissile import FileError
from fissile.lab.compute import compute
from fissile.lab.results import load, nearest
from fissile.lab.store import Run, Store
from fissile.lab.store.parquet import TrialsFile, write
from fissile.lab.studies import STUDIES

RUN = Run("theory", "smoke", None, {}, "fissile run theory --scale smoke")


def written(store, run, keys):
    write(file := io.BytesIO(), store, run, keys)
    return file.getvalue()


@pytest.fixture
def file(tmp_path):
    with Store(filled(tmp_path / "there", 1, 2, 3)) as there:
        (tmp_path / "trials.parquet").write_bytes(written(there, RUN, keys(3, 1, 9)))
    return tmp_path / "trials.parquet"


def test_a_store_takes_trials_from_a_file(file, tmp_path):
    with Store(tmp_path / "here") as here, Store(tmp_path / "there") as there:
        assert here.take(TrialsFile(file)) == 2
        assert here.take(TrialsFile(file)) == 0
        assert list(here.rows(keys(1, 2, 3))) == list(there.rows(keys(1, 3)))
        (run,) = here.runs()
        assert (run, run.number) == (replace(RUN, started=run.started), 1)
        assert run.started == min(here.rows(keys(1, 3)).finished)


def test_the_same_trials_are_the_same_bytes(file, tmp_path):
    with Store(tmp_path / "here") as here:
        here.take(TrialsFile(file))
        here.note_run(RUN)  # asked for again, later
        assert written(here, here.runs()[0], keys(3, 1)) == file.read_bytes()


def test_pictures_come_along(tmp_path):
    works = STUDIES["codes"].works("smoke", 1, {"train": 200})
    run = Run("codes", "smoke", 1, {"train": 200}, "fissile run codes")
    with Store(tmp_path / "there") as there, Store(tmp_path / "here") as here:
        there.add(compute(works), HERE)
        there.note_run(run)
        (tmp_path / "file").write_bytes(written(there, run, [work.key for work in works]))
        here.take(TrialsFile(tmp_path / "file"))
        found = [load(store, run, pictures=True) for store in (there, here)]
    assert found[0].frame.equals(found[1].frame)
    for name, drawn in found[0].pictures.items():
        assert drawn.tobytes() == found[1].pictures[name].tobytes()


def test_no_trial_is_taken_under_a_key_that_is_not_its_own(file, tmp_path):
    table = parquet.read_table(file)
    other = json.dumps(asdict(outcomes(7)[0].work))
    specs = pyarrow.array([table["spec"][0].as_py(), other])
    parquet.write_table(table.set_column(2, "spec", specs), file)
    with Store(tmp_path / "here") as here:
        with pytest.raises(FileError, match="not that of its settings"):
            here.take(TrialsFile(file))
        assert (here.count(), here.runs()) == (0, [])


BAD = {
    "cut": lambda f: f.write_bytes(f.read_bytes()[:-9]),
    "a text": lambda f: f.write_text("dear diary"),
    "without a column": lambda f: parquet.write_table(parquet.read_table(f).drop(["seconds"]), f),
    "without its run": lambda f: parquet.write_table(
        parquet.read_table(f).replace_schema_metadata(None), f
    ),
    "a time that is none": lambda f: parquet.write_table(
        parquet.read_table(f).set_column(7, "finished", pyarrow.array(["noon", "noon"])), f
    ),
}


@pytest.mark.parametrize("damage", BAD.values(), ids=BAD)
def test_nothing_is_taken_from_a_damaged_file(damage, file, tmp_path):
    damage(file)
    with Store(tmp_path / "here") as here:
        with pytest.raises(FileError, match=str(file)):
            here.take(TrialsFile(file))
        assert (here.count(), here.runs()) == (0, [])


@pytest.mark.parametrize("damage", ["a text", "without its run"])
def test_what_is_no_file_of_trials_is_not_called_damaged(damage, file, tmp_path):
    BAD[damage](file)
    err = called("take", file, "--out", tmp_path / "here", code=1).stderr
    assert f"error: {file} is no file of trials; give one that `fissile results RUN" in err
    assert "damaged" not in err


def test_the_command_takes_folders_and_files_that_the_command_wrote(file, tmp_path):
    there, here, kept = tmp_path / "there", tmp_path / "here", tmp_path / "kept.parquet"
    said = called("take", there, file, "--out", here).stdout
    assert said == f"3 new trials; {here} holds 3.\n"
    works = STUDIES["theory"].works("smoke")
    with Store(here) as store:
        store.add([replace(outcomes(1)[0], work=work) for work in works], HERE)
        held = nearest(store, ["theory"])[0]
        as_is = written(store, held, [work.key for work in works])
    called("results", "theory", "--format", "trials", "--to", kept, "--out", here)
    assert kept.read_bytes() == as_is
    assert (
        "give its name with --to"
        in called("results", "theory", "--format", "trials", "--out", here, code=1).stderr
    )
