"""What an error says must help wherever fissile came from."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fissile
from fissile._common.errors import needs

ROOT = Path(__file__).parents[3]


def command():
    with pytest.raises(fissile.FissileError, match="this needs no_such_module: ") as caught:
        needs("no_such_module", "files")
    return shlex.split(str(caught.value).partition(": ")[2])


def test_the_command_is_for_the_interpreter_that_runs():
    assert command() == [sys.executable, "-m", "pip", "install", "fissile[files]"]


@pytest.mark.slow
def test_the_command_finds_what_is_installed_without_an_index(tmp_path):
    dry = [*command(), "--dry-run", "--no-index", "--no-deps"]
    found = subprocess.run(dry, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "Would install" not in found.stdout


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]


def within(extra):
    """Return the extras that an extra brings, itself among them."""
    names = [name for one in EXTRAS[extra] for name in re.findall(r"^fissile\[(.*)\]", one)]
    return {extra}.union(*(within(name) for name in ",".join(names).split(",") if name))


def test_all_is_all_but_gpus_clusters_encoders_and_tools():
    elsewhere = {"gpu", "ray", "clip", "lite", "minilm", "text", "timm", "bench", "dev", "docs"}
    assert EXTRAS.keys() - within("all") == elsewhere
    source = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    asked = set(re.findall(r'needs\([^,()]+, "(\w+)"\)', source))
    assert {"onnx", "transformers", "lightning", "lab"} <= asked <= within("all") | {"gpu", "ray"}


def test_the_demo_installs_no_more_than_it_needs():
    recipe = (ROOT / "Makefile").read_text("utf-8").partition(".venv/demo.stamp: ")[2]
    assert "-e '.[data,files,lab,sklearn]'" in recipe.partition("\n\n")[0]
