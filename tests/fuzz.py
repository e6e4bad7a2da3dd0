"""Files of every format, damaged by their structure: ``make fuzz MINUTES=5``, or the tests.

Every file is read in a process that may take 1 GiB more than its imports, and for each file 20
seconds of a processor.
A reader may answer what was written or a ``FissileError``; of what has a checksum of ours, nothing
else. Whatever once found something stays in ``KEPT``.
"""

import argparse
import contextlib
import functools
import gzip
import hashlib
import io
import json
import math
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import data_files
import numpy as np
import torch
from safetensors.torch import load as load_tensors

import fissile
from fissile.data import read_features, write_features
from fissile.data.cifar import read_cifar
from fissile.data.idx import read_idx_folder
from fissile.data.text import read_banking, read_clinc
from fissile.expansion.saving import seal
from fissile.io import packing
from fissile.packed.files import checksum, lengthened, opened, sealed

SECONDS, MEMORY = 20, 2**30
NUMBERS = [0, 1, -1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 + 1, 2**53, 2**63, 2**64, 10**30]
ODD = [*NUMBERS, 0.5, 1e308, math.nan, math.inf, True, None, "", "a", "\x1b[2J", "../a", [], {}]
ODD += ["a" * 100_000, "a." * 50_000, [1] * 100_000, [[[[]]]], {"a": {"a": {}}}]


class Format(NamedTuple):
    """How a file of a format is made and read, and what two equal ones have in common."""

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    digest: Callable[[Any], str] | None = None
    seal: Callable[[Path], Any] = lambda path: None  # after a change by the structure


# ---- formats -----------------------------------------------------------------------------------


def model_digest(model):
    return f"{model!r}\n{tensors_digest(model)}"


def tensors_digest(model):
    parts = []
    for key, value in sorted(model.state_dict().items()):
        raw = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        parts.append(f"{key} {value.dtype} {[*value.shape]} {hashlib.md5(raw).hexdigest()}")
    return "\n".join(parts)


def saved(make):
    def write(folder):
        torch.manual_seed(0)
        fissile.save(make(fissile.MLP([12, 4, 3], layer_norm=True)), folder / "model")
        return folder / "model"

    return write


def both(path):
    """Read a model in both ways."""
    with contextlib.suppress(fissile.FissileError):
        packing.read(path)
    return fissile.load(path)


@functools.cache
def trained(recipe):
    from classifier_data import blobs

    from fissile.sklearn import FissileClassifier

    x, y = blobs(samples=40)
    sizes = {"nonzeros": 60, "tries": 1} if recipe == "best" else {"hidden": 4}
    how = {"recipe": recipe, "warm_up": 1, "fine_tune": 1, "batch": 20, "random_state": 0}
    return FissileClassifier(**sizes, **how).fit(x, np.array(["no", "perhaps", "yes"])[y])


def classifier(recipe):
    def write(folder):
        trained(recipe).save(folder / "classifier")
        return folder / "classifier"

    return write


def read_classifier(path):
    from fissile.sklearn import FissileClassifier

    return FissileClassifier.load(path)


def classifier_digest(found):
    told = found.classes_.tolist(), found.get_params(), found.loss_curve_, found.plan_
    return f"{model_digest(found.model_)} {told}"


def filled(name, **how):
    def write(folder):
        data = data_files.features(names=("a", "b", "c"), encoder="mine")
        if how:
            keys = ("x_train", "y_train", "x_test", "y_test")
            arrays = (data.x, data.y, data.x_test, data.y_test)
            np.savez_compressed(folder / name, **dict(zip(keys, arrays, strict=True)))
        else:
            write_features(folder / name, data)
        return folder / name

    return write


def features_digest(data):
    return f"{data.fingerprint()} {data.names} {data.encoder}"


def texts(folder):
    pairs = [["hi there", "a"], ["go away", "b"]]
    (folder / "data_full.json").write_text(json.dumps({"train": pairs, "test": pairs}))
    for name in ("train", "test"):
        (folder / f"{name}.csv").write_text("text,category\nhi there,a\ngo away,b\n")
    (folder / "categories.json").write_text('["a", "b"]')
    return folder


def table(folder):
    return data_files.feature_table(folder / "f.parquet", data_files.features())


SMALL, GREY = data_files.images(3, 2, (32, 32, 3), 2), data_files.images(3, 2, (4, 4), 2)
PARTS = data_files.cifar_parts(SMALL)
FORMATS = {
    "dense": Format(saved(lambda m: m), both, model_digest),
    "expanded": Format(saved(lambda m: fissile.expand(m, 2)), both, model_digest),
    "packed": Format(saved(lambda m: fissile.pack(fissile.expand(m, 2))), both, model_digest),
    "packed plane": Format(
        saved(lambda m: fissile.pack(fissile.expand(m, 2), layout="plane")), both, model_digest
    ),
    "classifier": Format(classifier("best"), read_classifier, classifier_digest),
    "classifier of the paper": Format(classifier("paper"), read_classifier, classifier_digest),
    "npz": Format(filled("f.npz"), read_features, features_digest),
    "packed npz": Format(filled("f.npz", packed=True), read_features),
    "features": Format(filled("f.safetensors"), read_features, features_digest),
    "folder": Format(filled("f"), read_features, features_digest),
    "table": Format(table, read_features),
    "idx": Format(lambda f: data_files.idx_folder(f, GREY), read_idx_folder),
    "plain idx": Format(lambda f: data_files.idx_folder(f, GREY, bytes), read_idx_folder),
    "cifar": Format(lambda f: data_files.cifar_folder(f / data_files.CIFAR, PARTS), read_cifar),
    "cifar archive": Format(lambda f: data_files.cifar_archive(f / "c.tar.gz", PARTS), read_cifar),
    "cifar tables": Format(lambda f: data_files.cifar_tables(f, SMALL), read_cifar),
    "clinc": Format(texts, read_clinc),
    "banking": Format(texts, read_banking),
}


def wide_folder(folder):
    from language_models import seeded

    fissile.expand(seeded(max_position_embeddings=16), 2).save_pretrained(folder / "wide")
    return folder / "wide"


def read_folder(folder):
    from transformers import AutoModelForSequenceClassification

    import fissile.integrations.transformers  # noqa: F401

    return AutoModelForSequenceClassification.from_pretrained(folder)


#: Slow to import, so asked for by name.
FOLDER = {"transformers": Format(wide_folder, read_folder, model_digest, seal)}

# ---- mutations ---------------------------------------------------------------------------------


def torn(data, rng):
    """Cut, flip, repeat or leave out bytes, or put a number where one may be; ends are likelier."""
    at = rng.choice([rng.randrange(len(data)), rng.randrange(min(300, len(data)))])
    at = rng.choice([at, len(data) - 1 - at])
    some = rng.choice([1, 4, 8, 100])
    how = rng.randrange(6)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if how == 2:
        return data[:at] + data[at : at + some] * 2 + data[at + some :]
    if how == 3:
        return data[:at] + data[at + some :]
    if how == 4:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    size = rng.choice([4, 8])
    number = rng.choice(NUMBERS) % 2 ** (8 * size)
    return data[:at] + number.to_bytes(size, rng.choice(["little", "big"])) + data[at + size :]


def bent(value, rng):
    """Change a JSON value in one place of any depth."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key, how = rng.choice(keys), rng.randrange(12)
        new = value.copy()
        if how == 0:
            del new[key]
        elif how == 1 and isinstance(value, dict):
            new[rng.choice(["a", "layers.9", "\x1b[2J", "a." * 999])] = new.pop(key)
        elif how == 1:
            new = new * rng.choice([2, 1000, 100_000 // len(new)])
        elif how == 2:
            new[key] = value[rng.choice(keys)]
        else:
            new[key] = bent(value[key], rng)
        return new
    if isinstance(value, int) and rng.random() < 0.5:
        return rng.choice([value + 1, value - 1, 2 * value, -value])
    return rng.choice(ODD)


def bent_text(text, rng):
    return json.dumps(bent(json.loads(text), rng))


def bent_tensors(data, rng):
    """Change the header of a safetensors file, its recipe, its note or its numbers; seal it."""
    size = int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    about = header.get("__metadata__", {})
    how = rng.choice(["header", "numbers", *about])
    if how in ("fissile", "fissile.sklearn"):
        about[how] = sealed(bent_text(opened(lengthened(about[how])), rng))
    elif how in about:
        about[how] = rng.choice([torn(about[how].encode(), rng).decode("latin1"), "[1]", "null"])
    elif how == "numbers" and tensors:
        for _ in range(rng.randrange(1, 9)):
            tensors[rng.randrange(len(tensors))] = rng.randrange(256)
    else:
        header = bent(header, rng)
    text = json.dumps(header).encode()
    made = struct.pack("<Q", len(text)) + text + tensors
    if how != "numbers" or "fissile" not in about:
        return made
    recipe = json.loads(opened(lengthened(about["fissile"])))
    recipe["crc32"] = checksum(load_tensors(made))
    header["__metadata__"]["fissile"] = sealed(json.dumps(recipe))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def bent_zip(data, rng):
    """Change a member of an archive, which then has the right checksum and may be packed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = rng.choice(list(members))
    members[name] = bent_array(members[name], rng)
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", rng.choice([0, 8])) as archive:
        for key, content in members.items():
            archive.writestr(key, content)
    return target.getvalue()


def bent_array(data, rng):
    """Change the header of a numpy file, or its bytes."""
    if rng.random() < 0.3:
        return torn(data, rng)
    shape = tuple(rng.choice(NUMBERS) for _ in range(rng.choice([0, 1, 2, 40])))
    kind = rng.choice(["<f2", "<i8", ">f4", "|O", "<U9", "<U99999999", "|V0", "<M8[s]", "|b1"])
    head = f"{{'descr': '{kind}', 'fortran_order': {rng.random() < 0.5}, 'shape': {shape}, }}\n"
    head = head.encode()
    rest = data[10 + int.from_bytes(data[8:10], "little") :]
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + rest


def bent_gzip(data, rng):
    return gzip.compress(torn(gzip.decompress(data), rng))


def bent_footer(data, rng):
    size = 8 + int.from_bytes(data[-8:-4], "little")
    return data[:-size] + torn(data[-size:], rng)


def structural(path, data):
    """Return how a file may be changed by its structure."""
    if data[:2] == b"PK":
        return bent_zip
    if data[:6] == b"\x93NUMPY":
        return bent_array
    if data[:2] == b"\x1f\x8b":
        return bent_gzip
    if data[:4] == b"PAR1":
        return bent_footer
    if path.suffix == ".json":
        return lambda data, rng: bent_text(data, rng).encode()
    return bent_tensors if data[8:9] == b"{" else torn


# ---- running -----------------------------------------------------------------------------------


class Hang(BaseException):
    """A file took too long."""


@contextlib.contextmanager
def limited():
    """Let this process have so much more memory than it has."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def ring_after():
    """Let alarms of this process end what it does: of its processor, and of the clock."""

    def ring(*_):
        raise Hang(f"more than {SECONDS} s")

    signal.signal(signal.SIGPROF, ring)
    signal.signal(signal.SIGALRM, ring)


#: What readers never do; and what was done of it.
RUNS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect")
RAN = []


def watch():
    """Note from now on whatever of that this process does."""
    sys.addaudithook(lambda event, _: RAN.append(event) if event in RUNS else None)


def outcome(read, path, digest=None, expected=None):
    """Return what came of reading a file: same, other, read, refused, or what should not be."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(10 * SECONDS)  # for what waits; a busy machine may take as long
    RAN.clear()
    try:
        found = read(path)
        if RAN:
            return f"did {RAN}"
        return "read" if digest is None else ["other", "same"][digest(found) == expected]
    except fissile.FissileError as error:
        text = str(error)
        if RAN:
            return f"did {RAN}"
        if "MemoryError" in text or "allocate" in text:
            return f"too much memory: {text[:200]}"
        good = len(text) < 5000 and "\n" not in text and text.isprintable()
        return "refused" if good else f"unreadable message: {text[:200]!r}"
    except (Exception, Hang) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def attack(name, seeds, folder, until=math.inf):
    """Damage a file of a format once for every seed; return the counts and what was found."""
    form, counts, found = (FORMATS | FOLDER)[name], Counter(), []
    path = form.make(folder)
    files = [p for p in [path, *path.rglob("*")] if p.is_file()] if path.is_dir() else [path]
    whole = {file: file.read_bytes() for file in sorted(files)}
    honest = form.read(path)  # and everything is imported
    expected = form.digest and form.digest(honest)
    for seed in seeds:
        if time.monotonic() > until:
            break
        rng = random.Random(f"{name} {seed}")
        file = rng.choice(list(whole))
        blind = rng.random() < 0.5
        mutate = torn if blind else structural(file, whole[file])
        print(f"{name} {seed}", file=sys.stderr, flush=True)
        file.write_bytes(mutate(whole[file], rng))
        if not blind:
            with contextlib.suppress(Exception):  # what is broken stays without a right checksum
                form.seal(path)
        with limited():
            result = outcome(form.read, path, form.digest if blind else None, expected)
        for file, data in whole.items():
            file.write_bytes(data)
        counts[result if result in ("same", "read", "refused") else "wrong"] += 1
        if result not in ("same", "read", "refused"):
            found.append(f"{name} {seed}: {result}")
    return counts, found


def child(names, first, cases, until=math.inf):
    """Attack formats in this process, and print the counts and findings as JSON."""
    ring_after()
    watch()
    warnings.simplefilter("ignore")
    told = {}
    from kept import KEPT

    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            if name == "kept":
                found = []
                for case, (make, read) in KEPT.items():
                    print(case, file=sys.stderr, flush=True)
                    place = Path(folder, case.replace(" ", "-"))
                    place.mkdir()
                    path = make(place)
                    with limited():
                        result = outcome(read, path)
                    if result != "refused":
                        found.append(f"{case}: {result}")
                told[name] = {"refused": len(KEPT) - len(found)}, found
            else:
                told[name] = attack(name, range(first, first + cases), Path(folder), until)
    print(json.dumps(told))


def spawn(names, first=0, cases=20):
    """Attack formats in a process of its own; what it printed, or how it ended."""
    command = [sys.executable, __file__, "--child", ",".join(names), str(first), str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-3:]
        return dict.fromkeys(names, ({}, [f"ended with {done.returncode} at {last}"]))
    return json.loads(done.stdout)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=5)
    options.add_argument("--first", type=int, default=0, help="the first seed")
    options.add_argument("--formats", default=",".join(FORMATS | FOLDER))
    options.add_argument("--child", nargs=3, metavar=("NAMES", "FIRST", "CASES"))
    given = options.parse_args()
    if given.child:
        child(given.child[0].split(","), *map(int, given.child[1:]))
        return
    end, first, total, bad = time.monotonic() + 60 * given.minutes, given.first, {}, 0
    names, cases = given.formats.split(","), 500
    while time.monotonic() < end:
        for name in names:
            [(counts, found)] = spawn([name], first, cases).values()
            total[name] = total.get(name, Counter()) + Counter(counts)
            bad += len(found)
            for one in found:
                print(one, flush=True)
        first, cases = first + cases, min(2000, 2 * cases)
    print("\n| format | files | read | same | refused | wrong |\n|---|---|---|---|---|---|")
    for name, counts in total.items():
        row = (counts[key] for key in ("read", "same", "refused", "wrong"))
        print(f"| {name} | {sum(counts.values()):,} | {' | '.join(f'{n:,}' for n in row)} |")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
