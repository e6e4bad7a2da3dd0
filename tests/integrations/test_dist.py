"""The wheel and the source distribution: built, and installed into an environment of its own."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import fissile

ROOT = Path(__file__).parents[2]
MODEL = (
    "import fissile; print(fissile.nonzeros(fissile.expand(fissile.MLP([32, 8, 1]), 2)).weights)"
)


def ran(*command, cwd):
    """Run a command that sees no sources but those that are installed."""
    apart = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=apart, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    ran(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.mark.slow
def test_the_wheel_installs_in_a_fresh_environment(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    ran(sys.executable, "-m", "venv", "--without-pip", tmp_path / "new", cwd=tmp_path)
    python = tmp_path / "new" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    ran(*pip, "install", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    # Dependencies come from the environment of the tests, where nothing but fissile is installed by
    # reference: a folder named in a .pth file has its own .pth files left alone.
    where = ran(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    )
    Path(where.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    file = ran(python, "-c", "import fissile; print(fissile.__file__)", cwd=tmp_path)
    assert Path(file.strip()).is_relative_to(tmp_path / "new")
    assert ran(python, "-c", MODEL, cwd=tmp_path) == "264\n"
    command = python.with_name("fissile")
    assert ran(command, "--version", cwd=tmp_path) == f"fissile {fissile.__version__}\n"
    ran(command, "new-study", "mine.py", cwd=tmp_path)  # from a template in the wheel
    assert "STUDY" in (tmp_path / "mine.py").read_text("utf-8")


@pytest.mark.slow
def test_every_file_of_the_package_is_in_both(dist):
    tracked = ran("git", "ls-files", "src", cwd=ROOT).split()
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        assert {name.removeprefix("src/") for name in tracked} <= set(file.namelist())
        (metadata,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        assert b"\nProject-URL: Paper, https://arxiv.org/abs/2510.04500\n" in file.read(metadata)
    with tarfile.open(source) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {
        *tracked,
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "Makefile",
        "constraints.txt",
    } <= names


def test_the_version_is_the_same_everywhere():
    with open(ROOT / "pyproject.toml", "rb") as file:
        version = tomllib.load(file)["project"]["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    newest = re.search(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert fissile.__version__ == version == cited["version"] == newest[1]
    assert str(cited["date-released"]) == newest[2]


def test_a_commit_is_checked_by_what_make_lint_runs():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    lint = (ROOT / "Makefile").read_text("utf-8").split("\nlint:", 1)[1].split("\n\n", 1)[0]
    hooks = [
        hook["entry"].replace(" --force-exclude", "")
        for repo in config["repos"]
        for hook in repo["hooks"]
    ]
    runs = re.findall(r"\$\(BIN\)/(.*)", lint)
    assert hooks == [f".venv/bin/{line.removesuffix(' .')}" for line in runs]
