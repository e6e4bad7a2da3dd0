"""Some hundred damaged files of every format: what was written, or one error of ours."""

import sys

import pytest

pytest.importorskip("resource")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's"),
]

import fuzz  # noqa: E402

CASES = 20
CHECKED = [name for name, form in fuzz.FORMATS.items() if form.digest]


@pytest.fixture(scope="module")
def told():
    """One process reads them all: starting Python takes longer."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("sklearn")
    names = list(fuzz.FORMATS)
    try:
        import transformers  # noqa: F401
    except ImportError:
        pass
    else:
        names.append("transformers")
    names.append("kept")  # when everything is imported
    return fuzz.spawn(names, first=0, cases=CASES)


def test_nothing_but_our_error(told):
    assert [one for _, found in told.values() for one in found] == []


def test_every_format_was_read_and_refused(told):
    for name in fuzz.FORMATS:
        counts, _ = told[name]
        assert sum(counts.values()) == CASES
        assert counts["refused"] > 0, name


def test_the_process_ends_what_hangs_or_takes_too_much():
    """The attack itself can fail."""

    def hang(path):
        while True:
            pass

    def fill(path):
        raise MemoryError

    fuzz_seconds, fuzz.SECONDS = fuzz.SECONDS, 1
    try:
        fuzz.ring_after()
        assert fuzz.outcome(hang, "a").startswith("Hang")
        assert fuzz.outcome(fill, "a").startswith("MemoryError")
        assert fuzz.outcome(lambda path: 3, "a", str, "4") == "other"
        assert fuzz.outcome(lambda path: 3, "a", str, "3") == "same"
    finally:
        fuzz.SECONDS = fuzz_seconds
