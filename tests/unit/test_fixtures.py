"""Files that earlier versions wrote are read, and hold what they held."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

FOLDER = Path(__file__).parents[1] / "fixtures"
SPEC = importlib.util.spec_from_file_location("fixtures_write", FOLDER / "write.py")
write = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(write)
DIGESTS = json.loads((FOLDER / "digests.json").read_text())


def test_every_file_is_known():
    here = {path.name for path in FOLDER.iterdir()} - {"write.py", "digests.json", "__pycache__"}
    assert here == DIGESTS.keys() == write.FILES.keys()


@pytest.mark.parametrize("name", DIGESTS)
def test_a_file_holds_what_it_held(name):
    if write.FILES[name] == "transformers":
        pytest.importorskip("transformers")
    assert write.digest(name) == DIGESTS[name]
