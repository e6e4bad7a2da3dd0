"""Every data set that fissile knows: what it is, on which terms, where it lies, how to get it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from fissile._common.errors import FileError, FissileError, needs
from fissile._common.files import reading
from fissile.data import generated
from fissile.data.cifar import coarsened, read_cifar
from fissile.data.features import read_features
from fissile.data.idx import FILES, read_idx_folder
from fissile.data.sets import Labelled
from fissile.data.text import Texts, read_banking, read_characters, read_clinc

SYSTEM = Path("/usr/share/datasets")  # where Debian's packages of data sets put them


@dataclass(frozen=True)
class Layout:
    """A file, or a folder with certain files, that a data set may lie in."""

    path: str
    inside: tuple[str, ...] = ()  # patterns; one that ends in [.gz] is of files packed or not

    def find(self, place: Path) -> Path | None:
        """Return its path if it is in that place; nothing is opened."""
        path = place / self.path
        try:
            there = all(map(any, self._matches(path))) if self.inside else path.is_file()
        except (OSError, ValueError):  # not ours to read, or no name a disk can have
            return None
        return path if there else None

    def within(self, path: Path) -> list[Path]:
        """Return the files of its folder, where it was found."""
        return [file for files in self._matches(path) for file in files]

    def _matches(self, path: Path) -> list[list[Path]]:
        """Return the files that match each pattern."""
        patterns = [(p.removesuffix("[.gz]"), p.replace("[.gz]", ".gz")) for p in self.inside]
        return [[f for name in dict.fromkeys(p) for f in path.glob(name)] for p in patterns]

    def __str__(self) -> str:
        return f"{self.path}/{{{', '.join(self.inside)}}}" if self.inside else self.path


@dataclass(frozen=True)
class Remote:
    """A file that can be downloaded, and its checksum."""

    url: str
    to: str  # relative to the data folder
    md5: str
    size: int  # bytes, about


@dataclass(frozen=True)
class Entry:
    """One data set.

    >>> ENTRIES["generated"].make().classes
    20
    """

    name: str
    about: str
    terms: str
    kind: Literal["images", "features", "text", "characters", "generated"]
    shape: tuple[int, ...]  # of one sample; empty for texts
    classes: int
    train: int | None  # samples; None where it depends on who made the set
    test: int | None
    encoder: str = ""
    files: tuple[Layout, ...] = ()
    get: str = ""
    urls: tuple[Remote, ...] = ()
    read: Callable[[Path], Labelled] | None = None
    read_texts: Callable[[Path], Texts] | None = None
    make: Callable[[], Labelled] | None = None
    fingerprint: str = ""  # of the contents, where they were compared with the source's


def _features(stem: str) -> tuple[Layout, ...]:
    files = [Layout(f"{stem}{suffix}") for suffix in (".npz", ".safetensors", ".parquet")]
    return (*files, Layout(stem, ("x_train.npy",)), Layout(stem, ("*.parquet",)))


def _read_coarse(path: Path) -> Labelled:
    """The features of all 100 classes of CIFAR-100, in their superclasses."""
    fine = read_features(path)
    with reading(path):
        return coarsened(fine)


def _made(
    name: str, about: str, terms: str, classes: int, train: int | None, test: int | None,
    encoder: str, stem: str, get: str, *, width: int = 512,
    read: Callable[[Path], Labelled] = read_features,
) -> Entry:  # fmt: skip
    """Return an entry for features that a frozen encoder makes."""
    layouts = _features(stem)
    return Entry(
        name, about, terms, "features", (width,), classes, train, test, encoder, layouts, get,
        read=read,
    )  # fmt: skip


def own(name: str, inputs: int, classes: int) -> Entry:
    """Return an entry for features of a user's own, in a file or folder of this name.

    >>> own("my-features", inputs=384, classes=7).files[0].path
    'my-features.npz'
    """
    if name in ENTRIES:
        raise FissileError(f"{name} is a data set that fissile knows; give yours another name")
    get = "put the file beside the study, or give its folder with --data"
    about = "features of your own"
    return _made(name, about, "yours", classes, None, None, "", name, get, width=inputs)


def _digits() -> Labelled:
    """Return the digits that come with scikit-learn, a quarter of each class to test on."""
    needs("sklearn", "sklearn")
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = found.images.astype(np.uint8), found.target
    return Labelled(x, y, x[:1], y[:1]).held_out(0.25)


_CLIP = "CLIP ViT-B/16"
_EMBED = "fissile embed {} --encoder open_clip:ViT-B-16/openai"
_LITE = "EfficientNet-Lite2 (ImageNet-supervised, PCA 512), not CLIP"
_EMBED_LITE = "fissile embed cifar100 --encoder efficientnet_lite:2 --pca 512"
_MINILM = "all-MiniLM-L6-v2, not CLIP"
_CITE = "cite Krizhevsky 2009; not for redistribution"
_IMAGENET = "ImageNet's terms: registered, non-commercial research"
CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
    "Ankle boot",
)  # fmt: skip
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_FASHION_FILES = (
    ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880), ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
    ("bef4ecab320f06d8554ea6380940ec79", 4_422_102), ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
)  # fmt: skip
_CIFAR = (
    ("cifar100", "photographs of 100 kinds of things, 32 x 32", 100),
    ("cifar100-coarse", "the images of cifar100 in their 20 superclasses", 20),
)
_CIFAR_FILES = (
    Layout("cifar100", ("train-*.parquet", "test-*.parquet")),
    Layout("cifar-100-python", ("train", "test", "meta")),
    Layout("cifar-100-python.tar.gz"),
)
_CIFAR_ARCHIVE = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "cifar-100-python.tar.gz",
    "eb9058c3a382ffc7106e4002c42a8d85", 169_001_437,
)  # fmt: skip
# Their sources publish no checksums: these are of the files at the revision in the address.
_CLINC = (
    "https://raw.githubusercontent.com/clinc/oos-eval/828f8093932c8fe6ca7936c3d2e52903b1c523de/"
    "data/data_full.json"
)
_CLINC_FILE = "30c29dc6ab78edf3b5dfa640be204cde", 2_495_390
_BANKING = (
    "https://raw.githubusercontent.com/PolyAI-LDN/task-specific-datasets/"
    "57ec275d8078af65b7731c2a98be812d844a6d6b/banking_data"
)
_BANKING_FILES = {
    "train.csv": ("cec64185f4197906aabce0781ef9a19b", 839_073),
    "test.csv": ("8dcd9dc31b686c75ec1f24bf23c140cb", 239_961),
    "categories.json": ("8312ff01430af97fba5a113b7a490269", 2_036),
}

_SHAKESPEARE = Remote(
    "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/"
    "data/tinyshakespeare/input.txt",
    "tinyshakespeare/input.txt", "6fb458f1232090904fb40fe944165e91", 1_115_394,
)  # fmt: skip

_ALL = [
    Entry(
        "fashionmnist", "grey photographs of clothes, 28 x 28", "MIT", "images",
        (28, 28), 10, 60_000, 10_000,
        files=tuple(
            Layout(folder, tuple(f"{name}[.gz]" for name in FILES))
            for folder in ("fashion-mnist", "fashionmnist")
        ),
        get="fissile data get fashionmnist, or on Debian and Ubuntu: apt install "
        "dataset-fashion-mnist",
        urls=tuple(
            Remote(f"{_FASHION}/{name}.gz", f"fashion-mnist/{name}.gz", *known)
            for name, known in zip(FILES, _FASHION_FILES, strict=True)
        ),
        read=lambda path: read_idx_folder(path, CLOTHES, most=2**26),
        fingerprint="ad7b16dc82fbed35",
    ),
    *(
        Entry(
            name, about, _CITE, "images", (32, 32, 3), classes, 50_000, 10_000,
            files=_CIFAR_FILES, urls=(_CIFAR_ARCHIVE,),
            read=partial(read_cifar, coarse=classes == 20),
            get=f"fissile data get {name} (https://www.cs.toronto.edu/~kriz/cifar.html)",
        )
        for name, about, classes in _CIFAR
    ),
    _made(
        "cifar100-clip", "CLIP features of cifar100, as in the paper", _CITE, 100, 50_000, 10_000,
        _CLIP, "cifar100-clip-vit-b-16", _EMBED.format("cifar100"),
    ),
    _made(
        "cifar100-coarse-clip", "CLIP features of cifar100 in its 20 superclasses", _CITE, 20,
        50_000, 10_000, _CLIP, "cifar100-clip-vit-b-16", _EMBED.format("cifar100"),
        read=_read_coarse,
    ),
    _made(
        "cifar100-efficientnet-lite2", "features of cifar100, not CLIP's", _CITE, 100, 50_000,
        10_000, _LITE, "cifar100-efficientnet-lite2-512", _EMBED_LITE,
    ),
    _made(
        "cifar100-coarse-efficientnet-lite2",
        "features of cifar100 in its 20 superclasses, not CLIP's", _CITE, 20, 50_000, 10_000,
        _LITE, "cifar100-efficientnet-lite2-512", _EMBED_LITE, read=_read_coarse,
    ),
    _made(
        "imagenet100-clip", "CLIP features of 100 random classes of ImageNet", _IMAGENET, 100,
        None, 5_000, _CLIP, "imagenet100-clip-vit-b-16",
        "put train/CLASS and val/CLASS of 100 classes into a folder "
        "(https://image-net.org/download.php) and run: "
        + _EMBED.format("PATH/TO/imagenet100") + " --to DATA/imagenet100-clip-vit-b-16.safetensors",
    ),
    _made(
        "imagenet1k-clip", "CLIP features of ImageNet", _IMAGENET, 1000, 1_281_167, 50_000, _CLIP,
        "imagenet1k-clip-vit-b-16",
        "get ImageNet as train/CLASS and val/CLASS (https://image-net.org/download.php) and run: "
        + _EMBED.format("PATH/TO/imagenet") + " --to DATA/imagenet1k-clip-vit-b-16.safetensors",
    ),
    Entry(
        "clinc150", "short requests and their 150 intents", "CC BY 3.0", "text",
        (), 150, 15_000, 4_500, files=(Layout("clinc150", ("data_full.json",)),),
        get="fissile data get clinc150 (https://github.com/clinc/oos-eval)",
        urls=(Remote(_CLINC, "clinc150/data_full.json", *_CLINC_FILE),),
        read_texts=read_clinc,
    ),
    Entry(
        "banking77", "questions to a bank and their 77 intents", "CC BY 4.0", "text",
        (), 77, 10_003, 3_080, files=(Layout("banking77", tuple(_BANKING_FILES)),),
        get="fissile data get banking77 (https://github.com/PolyAI-LDN/task-specific-datasets)",
        urls=tuple(
            Remote(f"{_BANKING}/{name}", f"banking77/{name}", *known)
            for name, known in _BANKING_FILES.items()
        ),
        read_texts=read_banking,
    ),
    _made(
        "clinc150-minilm", "MiniLM features of clinc150, not CLIP's", "CC BY 3.0", 150, 15_000,
        4_500, _MINILM, "clinc150-minilm-384", "fissile embed clinc150 --encoder minilm", width=384,
    ),
    _made(
        "banking77-minilm", "MiniLM features of banking77, not CLIP's", "CC BY 4.0", 77, 10_003,
        3_080, _MINILM, "banking77-minilm-384", "fissile embed banking77 --encoder minilm",
        width=384,
    ),
    Entry(
        "tinyshakespeare", "40,000 lines of Shakespeare, character by character", "public domain",
        "characters", (1,), 65, 1_003_854, 111_538,
        files=(Layout("tinyshakespeare", ("input.txt",)),),
        get="fissile data get tinyshakespeare (https://github.com/karpathy/char-rnn)",
        urls=(_SHAKESPEARE,), read=read_characters,
    ),
    Entry(
        "digits", "handwritten digits, 8 x 8", "CC BY 4.0", "images", (8, 8), 10, 1_348, 449,
        get="nothing to do, it comes with scikit-learn", make=_digits,
    ),
    Entry(
        "generated", "features around random class means", "made from a seed", "generated",
        (64,), 20, 2_000, 500, get="nothing to do, it is always there", make=generated.features,
    ),
    Entry(
        "generated-text", "16 characters that follow each other by chance", "made from a seed",
        "generated", (1,), 16, 4_499, 499, get="nothing to do, it is always there",
        make=generated.text,
    ),
    Entry(
        "generated-images", "noisy coloured stripes, 8 x 8", "made from a seed", "generated",
        (8, 8, 3), 10, 128, 64, get="nothing to do, it is always there",
        make=lambda: generated.images(side=8, train=128, test=64),
    ),
]  # fmt: skip

ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _ALL}


@dataclass(frozen=True)
class Found:
    """A data set and where it lies; nowhere if it is made from a seed."""

    entry: Entry
    path: Path | None

    def files(self) -> list[Path]:
        if self.path is None or self.path.is_file():
            return [] if self.path is None else [self.path]
        return sorted({file for layout in self.entry.files for file in layout.within(self.path)})


def places(data: Path | None = None) -> list[Path]:
    """Return the folders to look in: the one given, ``FISSILE_DATA``, cache, system.

    >>> os.environ["FISSILE_DATA"] = "/mnt/data"
    >>> places()
    [PosixPath('/mnt/data'), PosixPath('/home/me/.cache/fissile/data'), ...]
    """
    needs("platformdirs", "data")
    from platformdirs import user_cache_path

    given = [] if data is None else [Path(data)]
    named = [Path(part) for part in os.environ.get("FISSILE_DATA", "").split(os.pathsep) if part]
    cache = user_cache_path("fissile", appauthor=False, opinion=False) / "data"
    return list(dict.fromkeys([*given, *named, cache, SYSTEM]))


def entry(name: str | Entry) -> Entry:
    """Return what is known of a data set."""
    if isinstance(name, Entry):
        return name
    if name not in ENTRIES:
        raise FissileError(f"there is no data set {name!r}; give one of: {', '.join(ENTRIES)}")
    return ENTRIES[name]


def find(name: str | Entry, data: Path | None = None) -> Found | None:
    """Return a data set and where it lies, without opening it, or None.

    >>> find("fashionmnist").path
    PosixPath('/usr/share/datasets/fashion-mnist')
    """
    known = entry(name)
    if known.make is not None:
        return Found(known, None)
    paths = (layout.find(place) for place in places(data) for layout in known.files)
    return next((Found(known, path) for path in paths if path is not None), None)


def load(name: str | Entry, data: Path | None = None) -> Labelled:
    """Load a data set of images or features; large features are mapped, not read.

    >>> load("generated").x.shape
    (2000, 64)
    """
    known = entry(name)
    if known.make is not None:
        return known.make()
    if known.read is None:
        raise FissileError(f"{known.name} holds texts; embed them first, or use load_texts")
    path = _path(name, data)
    found = known.read(path)
    if found.x.shape[1:] != known.shape or found.classes > known.classes:
        raise FileError(
            f"{path}: holds {found.classes} classes of samples of shape {found.x.shape[1:]}, and "
            f"{known.name} has {known.classes} of {known.shape}; give its file another name"
        )
    return replace(found, encoder=found.encoder or known.encoder)


def load_texts(name: str, data: Path | None = None) -> Texts:
    """Load a data set of texts.

    >>> load_texts("banking77").train[0]
    'I am still waiting on my card?'
    """
    known = entry(name)
    if known.read_texts is None:
        raise FissileError(f"{name} holds no texts; use load")
    return known.read_texts(_path(name, data))


def _path(name: str | Entry, data: Path | None) -> Path:
    if (found := find(name, data)) is not None and found.path is not None:
        return found.path
    known = entry(name)
    raise FissileError(
        f"{known.name} is not here: looked for {', '.join(map(str, known.files))} in "
        f"{', '.join(map(str, places(data)))}. To get it: {known.get}. "
        "If you have it, give its folder with --data or FISSILE_DATA"
    )
