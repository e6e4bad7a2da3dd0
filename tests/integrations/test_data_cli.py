"""The command ``fissile data`` through its real entry point."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from data_files import features, idx_folder, images
from web_server import serving

from fissile.cli.__main__ import main
from fissile.data import catalogue, write_features
from fissile.data.catalogue import ENTRIES, Remote

FISSILE = shutil.which("fissile", path=Path(sys.executable).parent)


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """A machine without data and with a wide terminal."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "320")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("FISSILE_DATA", raising=False)
    monkeypatch.setattr(catalogue, "SYSTEM", tmp_path / "system")


@pytest.fixture
def fissile(capsys, monkeypatch):
    """Call the entry point itself: starting Python anew for every command would be slow."""

    def call(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["fissile", "data", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert end.value.code == code, said
        return said

    return call


@pytest.fixture
def small(monkeypatch):
    """Fashion-MNIST as if it had thirty images."""
    data = images(20, 10, (28, 28), 10)
    entry = replace(ENTRIES["fashionmnist"], train=20, test=10, fingerprint=data.fingerprint())
    monkeypatch.setitem(ENTRIES, "fashionmnist", entry)
    return data


def row(text, name):
    return next(line for line in text.splitlines() if line.split()[:1] == [name])


def test_the_command_itself(tmp_path):
    done = subprocess.run(
        [FISSILE, "data", "--data", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done
    for name in ENTRIES:
        assert name in done.stdout


def test_the_list_says_what_is_here(fissile, small, tmp_path, monkeypatch):
    text = fissile().out
    for name, entry in ENTRIES.items():
        assert entry.about in row(text, name)
        assert ("always here" if entry.make else "not here") in row(text, name)
    idx_folder(tmp_path / "mine" / "fashion-mnist", small)
    path = str(tmp_path / "mine" / "fashion-mnist")
    assert path in row(fissile("--data", tmp_path / "mine").out, "fashionmnist")
    monkeypatch.setenv("FISSILE_DATA", str(tmp_path / "mine"))
    assert path in row(fissile().out, "fashionmnist")


@pytest.mark.parametrize("name", list(ENTRIES))
def test_show_says_everything(name, fissile, tmp_path):
    text = fissile("show", name, "--data", tmp_path / "mine").out
    flat = " ".join(text.split())
    entry = ENTRIES[name]
    for part in (entry.about, entry.terms, entry.encoder, entry.get, f"{entry.classes:,}"):
        assert part in flat
    for remote in entry.urls:
        assert remote.url in flat
        assert remote.md5 in flat
    assert (str(tmp_path / "mine") in flat) == (entry.make is None)


def test_a_check_of_what_is_here(fissile, small, tmp_path):
    text = fissile("check").out
    assert "generated: good" in text
    assert "fashionmnist" not in text
    idx_folder(tmp_path / "fashion-mnist", small)
    text = fissile("check", "fashionmnist", "--data", tmp_path).out
    assert "fashionmnist: good" in text
    assert "20 training and 10 test samples" in text
    assert "generated" not in text
    (tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"hello")
    text = fissile("--data", tmp_path, "check", code=1).out
    assert "fashionmnist: bad" in text
    assert "problem: " in text
    assert "t10k-labels-idx1-ubyte.gz: " in text
    assert "generated: good" in text, "the others are checked all the same"


def test_a_check_of_what_is_not_here(fissile, tmp_path):
    assert "problem: cifar100 is not here" in fissile("check", "cifar100", code=1).out


def test_a_check_names_the_encoder(fissile, tmp_path):
    data = features(50_000, 10_000, 4, 100)
    write_features(tmp_path / "cifar100-clip-vit-b-16.npz", data)
    text = fissile("check", "cifar100-clip", "--data", tmp_path, code=1).out
    assert "samples of shape (4,)" in text


@pytest.mark.parametrize("command", ["show", "check", "get"])
def test_an_unknown_set(command, fissile):
    said = fissile(command, "mnist", code=1)
    assert said.err.startswith("error: there is no data set 'mnist'; give one of: fashionmnist")


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if not entry.urls])
def test_what_cannot_be_downloaded(name, fissile):
    said = fissile("get", name, code=1)
    assert f"error: {name} cannot be downloaded. To get it: {ENTRIES[name].get}" in said.err


@pytest.fixture
def source(small, tmp_path, monkeypatch):
    """The small set on a server of its own, and the catalogue pointing there."""
    folder = idx_folder(tmp_path / "web", small)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with serving(partial(Quiet, directory=str(folder))) as server:
        remotes = tuple(
            Remote(
                f"http://127.0.0.1:{server.server_port}/{path.name}",
                f"fashion-mnist/{path.name}",
                hashlib.md5(path.read_bytes()).hexdigest(),
                path.stat().st_size,
            )
            for path in sorted(folder.iterdir())
        )
        entry = replace(ENTRIES["fashionmnist"], urls=remotes)
        monkeypatch.setitem(ENTRIES, "fashionmnist", entry)
        yield folder


@pytest.mark.parametrize("where", ["option", "variable", "cache"])
def test_get_downloads_and_checks(where, fissile, source, tmp_path, monkeypatch):
    place = tmp_path / ("cache/fissile/data" if where == "cache" else "mine")
    if where == "variable":
        monkeypatch.setenv("FISSILE_DATA", os.pathsep.join([str(place), "/elsewhere"]))
    said = fissile("get", "fashionmnist", *(["--data", place] if where == "option" else []))
    assert "Terms of fashionmnist: MIT" in said.out
    assert "fashionmnist: good" in said.out
    for path in source.iterdir():
        assert (place / "fashion-mnist" / path.name).read_bytes() == path.read_bytes()
    assert len(list((place / "fashion-mnist").iterdir())) == 4
    again = fissile("get", "fashionmnist", "--data", place)
    assert "fashionmnist: good" in again.out


def test_get_says_what_went_wrong(fissile, source, tmp_path):
    (source / "t10k-labels-idx1-ubyte.gz").write_bytes(b"changed")
    said = fissile("get", "fashionmnist", "--data", tmp_path / "mine", code=1)
    assert "its md5 is" in said.err
    (source / "t10k-labels-idx1-ubyte.gz").unlink()
    said = fissile("get", "fashionmnist", "--data", tmp_path / "mine", code=1)
    assert "the server answers 404" in said.err


def test_get_of_contents_that_are_not_the_source(fissile, source, tmp_path, monkeypatch):
    entry = replace(ENTRIES["fashionmnist"], fingerprint="0" * 16)
    monkeypatch.setitem(ENTRIES, "fashionmnist", entry)
    said = fissile("get", "fashionmnist", "--data", tmp_path / "mine", code=1)
    assert "fashionmnist: bad" in said.out


def test_get_of_a_file_that_is_far_too_large(fissile, source, tmp_path):
    with open(source / "t10k-labels-idx1-ubyte.gz", "ab") as file:
        file.write(bytes(2**17))
    said = fissile("get", "fashionmnist", "--data", tmp_path / "mine", code=1)
    assert re.search(r"has 131,\d+ bytes, more than 65,\d+; refused", said.err)


def test_get_replaces_what_is_damaged(fissile, source, tmp_path):
    damaged = tmp_path / "mine" / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"hello")
    said = fissile("get", "fashionmnist", "--data", tmp_path / "mine")
    assert "fashionmnist: good" in said.out
    assert damaged.read_bytes() == (source / damaged.name).read_bytes()


def test_get_interrupted(fissile, source, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fissile.cli.data.download", stop)
    said = fissile("get", "fashionmnist", "--data", tmp_path / "mine", code=130)
    assert "the same command goes on" in said.err


def test_help_has_examples(fissile):
    for command in ([], ["show"], ["check"], ["get"]):
        assert "Example" in fissile(*command, "--help").out
