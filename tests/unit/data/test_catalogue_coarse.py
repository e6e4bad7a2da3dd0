"""Features of CIFAR-100 in its 20 superclasses, read from the file of the 100 classes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from data_files import feature_table, features

from fissile import FileError, FissileError
from fissile.data import catalogue, check, load, write_features
from fissile.data.catalogue import ENTRIES, find
from fissile.data.cifar import COARSE, SUPERCLASSES, coarsened

LITE = "cifar100-efficientnet-lite2"
COARSE_LITE = "cifar100-coarse-efficientnet-lite2"
STEM = f"{LITE}-512"
FINE = features(300, 100, 512, 100)
PAIRS = [(LITE, COARSE_LITE), ("cifar100-clip", "cifar100-coarse-clip")]
REAL = find(LITE)
IMAGES = find("cifar100")
TABLES = [] if IMAGES is None else sorted(IMAGES.path.glob("*.parquet"))

# Krizhevsky's own table; the fine labels number these names from a to z.
MEMBERS = {
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}
NAMES = sorted(name for members in MEMBERS.values() for name in members.split())


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """A machine without data, but for what a test puts there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FISSILE_DATA", raising=False)
    monkeypatch.setattr(catalogue, "SYSTEM", tmp_path / "system")


def test_every_superclass_has_five_classes():
    assert len(COARSE) == 100
    assert np.bincount(COARSE).tolist() == [5] * 20
    assert list(SUPERCLASSES) == sorted(set(SUPERCLASSES))
    assert len(SUPERCLASSES) == 20


def test_the_superclasses_are_those_of_the_report():
    found = {name: [] for name in SUPERCLASSES}
    for name, coarse in zip(NAMES, COARSE, strict=True):
        found[SUPERCLASSES[coarse]].append(name)
    assert found == {name: members.split() for name, members in MEMBERS.items()}


@pytest.mark.parametrize("name", [f"{STEM}.npz", f"{STEM}.safetensors", f"{STEM}.parquet", STEM])
def test_the_file_of_the_classes_is_enough(name, tmp_path):
    assert find(COARSE_LITE, tmp_path) is None
    if name.endswith(".parquet"):
        feature_table(tmp_path / name, FINE)
    else:
        write_features(tmp_path / name, FINE)
    assert find(COARSE_LITE, tmp_path).path == find(LITE, tmp_path).path == tmp_path / name
    fine, coarse = load(LITE, tmp_path), load(COARSE_LITE, tmp_path)
    for x in ("x", "x_test"):
        assert np.array_equal(getattr(coarse, x), getattr(fine, x))
    for y in ("y", "y_test"):
        assert getattr(coarse, y).tolist() == [COARSE[label] for label in getattr(FINE, y)]
    assert (coarse.classes, coarse.names) == (20, SUPERCLASSES)
    assert coarse.fingerprint() != fine.fingerprint() == FINE.fingerprint()


@pytest.mark.parametrize(("fine", "coarse"), PAIRS)
def test_what_is_known_of_both_is_the_same(fine, coarse):
    old, new = ENTRIES[fine], ENTRIES[coarse]
    for what in ("terms", "kind", "shape", "train", "test", "encoder", "files", "get", "urls"):
        assert getattr(new, what) == getattr(old, what), what
    assert new.about != old.about
    assert (old.classes, new.classes) == (100, 20)


def test_the_encoder_is_what_the_file_says_or_the_catalogue(tmp_path):
    write_features(tmp_path / f"{STEM}.npz", FINE)
    assert load(COARSE_LITE, tmp_path).encoder == load(LITE, tmp_path).encoder
    assert load(COARSE_LITE, tmp_path).encoder.endswith("not CLIP")
    write_features(tmp_path / f"{STEM}.npz", replace(FINE, encoder="mine", names=NAMES))
    assert load(COARSE_LITE, tmp_path).encoder == "mine"
    assert load(COARSE_LITE, tmp_path).names == SUPERCLASSES


@pytest.mark.parametrize("classes", [20, 99, 101])
def test_other_classes_have_no_superclasses(classes, tmp_path):
    other = features(300, 300, 512, classes)
    with pytest.raises(FissileError, match=f"^it holds {classes} classes, .* of all 100$"):
        coarsened(other)
    write_features(tmp_path / f"{STEM}.npz", other)
    with pytest.raises(FileError, match=f"{STEM}.npz: it holds {classes} classes") as caught:
        load(COARSE_LITE, tmp_path)
    assert str(caught.value).count(STEM) == 1


def test_a_torn_file_is_named_once(tmp_path):
    (tmp_path / f"{STEM}.npz").write_bytes(b"hello")
    with pytest.raises(FileError, match=f"{STEM}.npz: ") as caught:
        load(COARSE_LITE, tmp_path)
    assert str(caught.value).count(STEM) == 1


def test_a_check(tmp_path, monkeypatch):
    small = replace(ENTRIES[COARSE_LITE], train=300, test=100)
    monkeypatch.setitem(catalogue.ENTRIES, COARSE_LITE, small)
    write_features(tmp_path / f"{STEM}.npz", FINE)
    report = check.check(COARSE_LITE, tmp_path)
    assert report.problems == ()
    assert [path for path, _ in report.files] == [tmp_path / f"{STEM}.npz"]
    assert "20 classes, 15 training samples each" in report.facts
    assert f"encoder: {ENTRIES[LITE].encoder}" in report.facts
    write_features(tmp_path / f"{STEM}.npz", features(300, 100, 512, 40))
    (problem,) = check.check(COARSE_LITE, tmp_path).problems
    assert "it holds 40 classes" in problem


@pytest.mark.skipif(REAL is None, reason=f"{LITE} is not here")
def test_the_real_features():
    fine, coarse = (load(name, REAL.path.parent) for name in (LITE, COARSE_LITE))
    assert np.array_equal(np.array(COARSE)[fine.y], coarse.y)
    assert np.bincount(coarse.y).tolist() == [2_500] * 20
    assert np.bincount(coarse.y_test).tolist() == [500] * 20


@pytest.mark.skipif(not TABLES, reason="CIFAR-100 is not here as tables")
def test_the_real_labels():
    from pyarrow import parquet

    labels = [parquet.read_table(p, columns=["fine_label", "coarse_label"]) for p in TABLES]
    fine, coarse = (
        np.concatenate([table[f"{kind}_label"].to_numpy() for table in labels])
        for kind in ("fine", "coarse")
    )
    assert len(fine) == 60_000
    assert np.array_equal(np.array(COARSE)[fine], coarse)
    if (told := IMAGES.path / "names.json").is_file():
        names = json.loads(told.read_text())
        assert (names["fine_label"], names["coarse_label"]) == (NAMES, list(SUPERCLASSES))
