"""The studies of real data through the command line, on sets that are made from a seed."""

import csv
import shutil

import pytest
from command import called

from fissile.data import catalogue
from fissile.lab import classifier
from fissile.lab.store import Store
from fissile.lab.studies import STUDIES, find

REAL = {name: study for name, study in STUDIES.items() if study.data("smoke")}
CNN = ("cnn-256", "cnn-512")
#: On sets that are always there, at the smallest scale.
OWN = ("foretell", "interference-real", "guided", "transformer")
MLP = [name for name in REAL if name not in (*CNN, *OWN)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A store with every study of real data at the smallest scale, on generated sets."""
    folder = tmp_path_factory.mktemp("lab")
    run = ("--scale", "smoke", "--out", folder, "--set")
    called("run", *MLP, *run, "data=generated")
    called("run", *CNN, *run, "data=generated-images")
    called("run", *OWN, *run[:-1])
    return folder


@pytest.mark.slow
def test_every_study_runs_and_is_reported(lab, tmp_path):
    called("report", "--out", lab, "--to", tmp_path)
    page = (tmp_path / "index.html").read_text()
    with open(tmp_path / "claims.csv", newline="") as file:
        judged = {row["study"] for row in csv.DictReader(file)}
    assert judged == {name for name, study in REAL.items() if study.claims}
    assert set(REAL) - judged == {study.id for study in find(["ablation"])}  # which claim nothing
    for name, study in REAL.items():
        assert study.title in page
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "figures" / f"{name}.csv").read_text().count("\n") > 1
        assert (tmp_path / "tables" / f"{name}.csv").exists() == bool(study.published)
    assert "fingerprint" in page  # of the arrays, beside how it was made
    again = called("run", *MLP, "--scale", "smoke", "--out", lab, "--set", "data=generated")
    assert "0 trials computed" in again.stdout


@pytest.mark.slow
def test_results_hang_on_the_arrays_and_not_on_their_name_alone(lab):
    with Store(lab, create=False) as store:
        runs = {run.study: run for run in store.runs()}
        works = REAL["cifar100"].works("smoke", changes=runs["cifar100"].changes)
        assert len(store.finished(work.key for work in works)) == len(works)
        other = REAL["cifar100"].works(
            "smoke", changes=runs["cifar100"].changes | {"fingerprint": "0" * 16}
        )
        assert not store.finished(work.key for work in other)
    assert runs["cifar100"].told == {"data": "generated"}
    assert "fingerprint" not in runs["cifar100"].command


@pytest.mark.slow
def test_the_frontier_is_reported_by_one_name(lab, tmp_path):
    called("report", "frontier", "theory", "--out", lab, "--to", tmp_path)
    drawn = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert drawn == {study.id for study in find(["frontier"])}
    assert "Ours: At every budget the recipe is level" in (tmp_path / "index.html").read_text()
    status = called("status", "--out", lab).stdout
    assert all(f"{study.id}-1 " in status for study in find(["frontier", "ablation"]))
    table = called("results", "frontier-coarse", "--out", lab).stdout.splitlines()
    columns = (
        "data,encoder,classes,validation,scaling,neurons,budget,epochs,arm,trial,measure,value"
    )
    assert table[0] == columns


def test_a_name_for_several_leaves_out_what_there_is_no_data_for(tmp_path, monkeypatch):
    monkeypatch.setattr("fissile.cli.run.find_set", lambda name: None)
    done = called("run", "ablation", "--scale", "smoke", "--out", tmp_path / "lab", code=1)
    assert "ablation-coarse (needs cifar100-coarse-efficientnet-lite2)" in done.stderr
    assert "there is nothing to run" in done.stderr
    assert not (tmp_path / "lab").exists()


def test_missing_data_is_said_with_what_to_do(tmp_path):
    nowhere = {"FISSILE_DATA": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = called("run", "cifar100", "--scale", "smoke", "--out", tmp_path, code=1, **nowhere)
    assert "cifar100-clip is not here" in done.stderr
    assert "fissile embed cifar100 --encoder open_clip:ViT-B-16/openai" in done.stderr
    assert "FISSILE_DATA" in done.stderr
    assert not (tmp_path / "trials.sqlite").exists()
    done = called("run", "cifar100", "--data", tmp_path / "no", "--out", tmp_path, code=1)
    assert f"there is no folder {tmp_path / 'no'}" in done.stderr


def test_a_study_takes_only_data_that_fits_it(tmp_path):
    def refused(*words):
        return called("run", *words, "--scale", "smoke", "--out", tmp_path, code=1).stderr

    assert "data='clinc150' cannot be used here" in refused("cifar100", "--set", "data=clinc150")
    assert "give one of cifar100" in refused("cnn-256", "--set", "data=fashionmnist")
    assert "generated has 20 classes; classes=40" in refused(
        "cifar100", "--set", "data=generated", "--set", "classes=40"
    )


@pytest.mark.slow
def test_features_in_a_folder_of_the_user_s(tmp_path, monkeypatch):
    from fissile.data.features import write_features
    from fissile.data.generated import features

    # A process remembers the arrays of a set; here every command is to read them anew.
    monkeypatch.setattr(classifier, "_from_files", classifier._from_files.__wrapped__)
    made = features(inputs=512, classes=100, train=1000, test=200)
    write_features(tmp_path / "cifar100-clip-vit-b-16.npz", made)
    run = ("run", "cifar100", "--scale", "smoke", "--trials", "1", "--out", tmp_path / "lab")
    assert "6 trials computed" in called(*run, "--data", tmp_path).stdout
    # The same features in another format are the same results; others are others.
    (tmp_path / "cifar100-clip-vit-b-16.npz").unlink()
    write_features(tmp_path / "cifar100-clip-vit-b-16", made)
    assert "6 found in the store" in called(*run, FISSILE_DATA=str(tmp_path)).stdout
    shutil.rmtree(tmp_path / "cifar100-clip-vit-b-16")
    made.x[0, 0] += 1
    write_features(tmp_path / "cifar100-clip-vit-b-16", made)
    assert "6 trials computed" in called(*run, "--data", tmp_path).stdout


@pytest.mark.slow
@pytest.mark.skipif(catalogue.find("fashionmnist") is None, reason="FashionMNIST is not here")
def test_fashionmnist_itself(tmp_path):
    out = called("run", "fashionmnist", "--scale", "smoke", "--trials", "1", "--out", tmp_path)
    assert "6 trials computed" in out.stdout
    with Store(tmp_path, create=False) as store:
        run = store.runs()[0]
        works = REAL["fashionmnist"].works("smoke", 1, run.changes)
        rows = store.rows([work.key for work in works])
    assert all(row.measures["accuracy"] > 0.5 for row in rows)  # after two epochs; chance is 0.1
