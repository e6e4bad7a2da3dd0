"""CONTRIBUTING.md, done as it says in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import QUIET

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def section(title):
    return TEXT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def blocks(title, language):
    return re.findall(rf"^```{language}\n(.*?)^```", section(title), re.M | re.S)


@pytest.fixture
def clone(tmp_path):
    """A copy of what a contributor changes: the sources, and the tests beside them."""
    apart = shutil.ignore_patterns("__pycache__", ".git", ".venv", "build", ".*_cache")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=apart)
    for name in ("results", "docs", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("pyproject.toml", "CONTRIBUTING.md", "README.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def python(clone, *arguments):
    """Run Python with the copy's sources."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=clone,
        env=os.environ | QUIET | {"PYTHONPATH": str(clone / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def edited(path, *changes):
    text = path.read_text("utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, "utf-8")


@pytest.mark.slow
def test_a_split_is_added_as_it_says(clone):
    (code,) = blocks("Adding a split", "python")
    python(clone, "-c", code)  # from outside the package
    halves = re.search(r"^class Halves.*?(?=^fissile\.)", code, re.M | re.S)[0]
    edited(
        clone / "src" / "fissile" / "expansion" / "split.py",
        (
            "class Structured(Split):",
            f"{halves.replace('fissile.Split', 'Split')}class Structured(Split):",
        ),
        ('    "random": Random,\n', '    "random": Random,\n    "halves": Halves,\n'),
    )
    edited(
        clone / "tests" / "networks.py",
        ("fitting = [Random(), ", "fitting = [Halves(), Random(), "),
        (
            "from fissile import MLP",
            "from fissile.expansion.split import Halves\nfrom fissile import MLP",
        ),
    )
    python(clone, "-m", "ruff", "check", "src/fissile/expansion/split.py")
    out = python(clone, "-m", "pytest", "-q", "-n", "0", "-x", "tests/unit/expansion/test_split.py")
    assert " passed" in out


#: What looks at every study; each is run with one more of them.
CHECKS = (
    "tests/studies/test_results.py::test_a_study_with_verdicts_has_its_numbers_and_the_other_way_round",
    "tests/studies/test_results.py::test_every_network_kept_its_budget",
    "tests/unit/test_pins.py::test_every_study_has_the_trials_it_had",
    "tests/unit/test_pins.py::test_one_trial_of_every_kind_has_the_key_it_had",
    "tests/unit/lab/test_trial.py",
    "tests/unit/lab/test_task_converged.py::test_every_study_that_trains_networks_has_the_claim",
    "tests/unit/lab/plots/test_panels.py",
    "tests/integrations/test_cli.py::test_every_smoke_scale_takes_seconds",
    "tests/integrations/test_docs.py::test_a_page_runs_and_prints_what_it_shows[docs/concepts/lab.md]",
)


@pytest.mark.slow
def test_a_study_is_added_as_it_says_and_breaks_no_test(clone):
    (commands,) = blocks("Adding a study", "sh")
    for line in commands.splitlines():
        program, *words = line.split()
        assert program == "fissile"
        python(clone, "-m", "fissile.cli", *words)
    assert "`mine.STUDY` to `STUDIES`" in section("Adding a study")
    edited(
        clone / "src" / "fissile" / "lab" / "studies" / "__init__.py",
        ("    foretell,\n", "    foretell,\n    mine,\n"),
        ("        *FRONTIERS,\n", "        mine.STUDY,\n        *FRONTIERS,\n"),
    )
    python(clone, "-m", "ruff", "check", "src/fissile/lab/studies/mine.py")
    names = python(clone, "-c", "from fissile.lab.studies import *; print(*STUDIES)").split()
    assert "mine" in names
    others = " and not ".join(name for name in names if name != "mine" and "-" not in name)
    apart = "not frontier and not ablation and not " + others
    out = python(clone, "-m", "pytest", "-q", "-n", "0", "-k", f"mine or ({apart})", *CHECKS)
    assert " passed" in out
    assert "failed" not in out
