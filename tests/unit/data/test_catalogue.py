"""The catalogue: where sets are looked for, what is loaded, what a check finds."""

import gzip
import hashlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_files import (
    CIFAR,
    cifar_archive,
    cifar_folder,
    cifar_parts,
    cifar_tables,
    features,
    idx_folder,
    images,
)

from fissile import FileError, FissileError
from fissile.data import catalogue, check, load, load_texts, write_features
from fissile.data.catalogue import ENTRIES, Remote, find
from fissile.data.idx import FILES

CLIP = "cifar100-clip-vit-b-16"
CLIPPED = features(300, 100, 512, 100)


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """A machine without data, but for what a test puts there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FISSILE_DATA", raising=False)
    monkeypatch.setattr(catalogue, "SYSTEM", tmp_path / "system")


def test_places_from_first_to_last(tmp_path, monkeypatch):
    cache = tmp_path / "cache" / "fissile" / "data"
    assert catalogue.places() == [cache, tmp_path / "system"]
    monkeypatch.setenv("FISSILE_DATA", os.pathsep.join(["/one", "", "/two"]))
    expected = [Path("/mine"), Path("/one"), Path("/two"), cache, tmp_path / "system"]
    assert catalogue.places(Path("/mine")) == expected
    assert catalogue.places(Path("/two"))[0] == Path("/two")
    assert len(catalogue.places(Path("/two"))) == 4, "no place twice"


@pytest.mark.skipif(sys.platform != "linux", reason="other platforms keep caches elsewhere")
def test_the_cache_is_where_the_platform_has_it(tmp_path, monkeypatch):
    assert catalogue.places()[0] == tmp_path / "cache/fissile/data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalogue.places()[0] == tmp_path / ".cache/fissile/data"


def test_every_format_of_features_is_found(tmp_path):
    for name in (f"{CLIP}.npz", f"{CLIP}.safetensors", CLIP):
        place = tmp_path / name
        place.mkdir()
        assert find("cifar100-clip", place) is None
        write_features(place / name, CLIPPED)
        assert find("cifar100-clip", place).path == place / name
        data = load("cifar100-clip", place)
        assert data.fingerprint() == CLIPPED.fingerprint()
        assert data.encoder == "CLIP ViT-B/16", "the catalogue knows what the file does not say"
    write_features(place / CLIP, replace(CLIPPED, encoder="CLIP, but mine"))
    assert load("cifar100-clip", place).encoder == "CLIP, but mine"


def test_a_lookup_opens_nothing(tmp_path):
    (tmp_path / f"{CLIP}.npz").write_bytes(b"hello")
    assert find("cifar100-clip", tmp_path).path == tmp_path / f"{CLIP}.npz"
    with pytest.raises(FileError, match=f"{CLIP}.npz: "):
        load("cifar100-clip", tmp_path)


def test_the_first_place_wins(tmp_path, monkeypatch):
    for name in ("one", "two"):
        idx_folder(tmp_path / name / "fashion-mnist", images(12, 8, (28, 28), 5))
    monkeypatch.setenv("FISSILE_DATA", str(tmp_path / "two"))
    assert find("fashionmnist").path == tmp_path / "two" / "fashion-mnist"
    assert find("fashionmnist", tmp_path / "one").path == tmp_path / "one" / "fashion-mnist"
    (tmp_path / "one" / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert find("fashionmnist", tmp_path / "one").path == tmp_path / "two" / "fashion-mnist"


def test_cifar_in_all_its_shapes(tmp_path):
    data = images()
    makers = {
        "a": lambda place: cifar_tables(place / "cifar100", data),
        "b": lambda place: cifar_folder(place / CIFAR, cifar_parts(data)),
        "c": lambda place: cifar_archive(place / f"{CIFAR}.tar.gz", cifar_parts(data)),
    }
    for name, make in makers.items():
        place = tmp_path / name
        place.mkdir()
        made = make(place)
        assert find("cifar100", place).path == made
        assert load("cifar100", place).fingerprint() == data.fingerprint()
        assert load("cifar100-coarse", place).classes == 2


def test_a_file_of_another_set_is_refused(tmp_path):
    for other in (features(20, 10, 500, 5), features(300, 300, 512, 101)):
        write_features(tmp_path / f"{CLIP}.npz", other)
        with pytest.raises(FileError, match="cifar100-clip has 100 of"):
            load("cifar100-clip", tmp_path)


@pytest.mark.parametrize("name", [n for n, entry in ENTRIES.items() if entry.make is None])
def test_a_missing_set_says_what_to_do(name, tmp_path):
    with pytest.raises(FissileError) as caught:
        (load_texts if ENTRIES[name].read_texts else load)(name, tmp_path / "mine")
    message = str(caught.value)
    for part in (
        name,
        ENTRIES[name].get,
        str(tmp_path / "mine"),
        str(tmp_path / "system"),
        "--data",
    ):
        assert part in message
    for layout in ENTRIES[name].files:
        assert layout.path in message


def test_mistaken_names(tmp_path):
    with pytest.raises(FissileError, match="there is no data set 'mnist'; give one of: fashionm"):
        load("mnist")
    with pytest.raises(FissileError, match="holds texts"):
        load("clinc150")
    with pytest.raises(FissileError, match="holds no texts"):
        load_texts("generated")


def test_entries_are_whole():
    for name, entry in ENTRIES.items():
        assert entry.name == name
        assert sum(way is not None for way in (entry.read, entry.read_texts, entry.make)) == 1
        assert bool(entry.files) == (entry.make is None)
        assert entry.terms
        assert entry.get
        assert (entry.kind == "features") == bool(entry.encoder)
        assert len(entry.shape) == {"text": 0, "features": 1}.get(entry.kind, len(entry.shape))
        for remote in entry.urls:
            assert re.fullmatch(r"[0-9a-f]{32}", remote.md5)
            assert 0 < remote.size < 2**28
            if "githubusercontent" in remote.url:  # one revision: what is there cannot change
                assert re.search(r"/[0-9a-f]{40}/", remote.url)
            home = Path(remote.to).parts[0]
            assert any(layout.path == home for layout in entry.files), "downloads are found again"
    for name in ENTRIES:
        if "CLIP" in ENTRIES[name].encoder:
            assert ("not CLIP" in ENTRIES[name].encoder) != ("clip" in name)


@pytest.mark.parametrize("name", ["generated", "generated-images"])
def test_generated_sets_are_always_there(name):
    entry, data = ENTRIES[name], load(name)
    assert (data.x.shape, data.x_test.shape[0]) == ((entry.train, *entry.shape), entry.test)
    assert data.classes == entry.classes
    assert data.fingerprint() == load(name).fingerprint()
    assert check.check(name).problems == ()


def test_generated_features_are_neither_easy_nor_hopeless():
    from sklearn.linear_model import LogisticRegression

    data = load("generated")
    model = LogisticRegression(C=0.1, max_iter=200).fit(data.x, data.y)
    assert 0.7 < model.score(data.x_test, data.y_test) < 0.9


def fashion(place, changes=lambda data: data):
    return idx_folder(place / "fashion-mnist", changes(images(20, 10, (28, 28), 10)))


def known(monkeypatch, **changes):
    entry = replace(ENTRIES["fashionmnist"], train=20, test=10, **changes)
    monkeypatch.setitem(catalogue.ENTRIES, "fashionmnist", entry)


def test_a_check_finds_nothing_wrong(tmp_path, monkeypatch):
    folder = fashion(tmp_path)
    right = images(20, 10, (28, 28), 10).fingerprint()
    md5s = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    remotes = tuple(Remote("", f"fashion-mnist/{name}", md5, 999) for name, md5 in md5s.items())
    known(monkeypatch, fingerprint="", urls=remotes)
    report = check.check("fashionmnist", tmp_path)
    assert report.problems == ()
    assert report.path == folder
    assert {path.name: size for path, size in report.files} == {
        path.name: path.stat().st_size for path in folder.iterdir()
    }
    text = "\n".join(report.facts)
    for fact in ("20 training and 10 test", "10 classes, 2 training samples each", right):
        assert fact in text
    assert text.count("has the md5 of its source") == 4
    repacked = folder / "t10k-images-idx3-ubyte.gz"
    repacked.write_bytes(gzip.compress(gzip.decompress(repacked.read_bytes()), 1, mtime=1))
    report = check.check("fashionmnist", tmp_path)
    assert len(report.problems) == 1
    assert "t10k-images-idx3-ubyte.gz: its md5 is not" in report.problems[0]
    known(monkeypatch, fingerprint=right, urls=remotes)
    report = check.check("fashionmnist", tmp_path)
    assert report.problems == (), "the same contents, packed anew"
    assert "t10k-images-idx3-ubyte.gz is packed anew, its md5 is not the source's" in report.facts


def cut(data):
    return replace(data, x=data.x[:19], y=data.y[:19])


WRONG = {
    "it has 19 training samples, not 20": cut,
    "it has 9 test samples, not 10": lambda d: replace(d, x_test=d.x_test[:9], y_test=d.y_test[:9]),
    "1 classes have no training samples": lambda d: replace(d, y=np.maximum(d.y, 1)),
    "1 classes have no test samples": lambda d: replace(d, y_test=np.maximum(d.y_test, 1)),
    "its contents are not the source's": lambda d: replace(d, x=255 - d.x),
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_check_finds_what_is_wrong(problem, tmp_path, monkeypatch):
    known(monkeypatch, fingerprint=images(20, 10, (28, 28), 10).fingerprint())
    fashion(tmp_path, WRONG[problem])
    report = check.check("fashionmnist", tmp_path)
    assert any(found.startswith(problem) for found in report.problems), report


def test_a_check_of_too_few_classes(tmp_path):
    write_features(tmp_path / f"{CLIP}.npz", features(50, 50, 512, 40))
    problems = check.check("cifar100-clip", tmp_path).problems
    assert "it has 40 classes, not 100; get it again" in problems


def test_a_check_raises_nothing(tmp_path):
    assert "is not here" in check.check("cifar100", tmp_path).problems[0]
    (tmp_path / f"{CIFAR}.tar.gz").write_bytes(b"hello")
    report = check.check("cifar100", tmp_path)
    assert len(report.problems) == 2
    assert "its md5 is not eb9058c3a382ffc7106e4002c42a8d85" in report.problems[0]
    assert f"{CIFAR}.tar.gz: " in report.problems[1]
    with pytest.raises(FissileError, match="no data set"):
        check.check("mnist")


def test_what_cannot_be_looked_at_is_not_there(tmp_path, monkeypatch):
    for name in ("fashionmnist", "cifar100-clip"):
        assert find(name, tmp_path / ("a" * 300)) is None
        assert find(name, Path("a\0b")) is None

    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    for method in ("is_file", "glob"):
        monkeypatch.setattr(Path, method, forbidden)
    assert find("fashionmnist", tmp_path) is None
    assert find("cifar100-clip", tmp_path) is None


def test_half_a_download_is_not_the_set(tmp_path):
    folder = fashion(tmp_path)
    assert find("fashionmnist", tmp_path).path == folder
    (folder / f"{FILES[0]}.gz").rename(folder / f"{FILES[0]}.gz.part")
    assert find("fashionmnist", tmp_path) is None
    (folder / FILES[0]).write_bytes(b"unpacked")
    found = find("fashionmnist", tmp_path)
    assert found.path == folder
    assert len(found.entry.files[0].within(folder)) == 4


def test_the_advice_names_encoders_that_there_are():
    from fissile.data.embed.encoders import FAMILIES

    specs = [
        spec for entry in ENTRIES.values() for spec in re.findall(r"--encoder (\S+)", entry.get)
    ]
    assert len(specs) == sum(entry.kind == "features" for entry in ENTRIES.values())
    assert {spec.partition(":")[0] for spec in specs} <= set(FAMILIES)
