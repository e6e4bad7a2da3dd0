"""How the house must stay: the order in CONTRIBUTING.md, and examples for what is public."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pins
import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fissile"
#: More would no longer fit on a screen; the marker of a typed package is no entry to read.
MOST_ENTRIES = 15


def order_in(text):
    """Return the packages of CONTRIBUTING's table, from top to bottom.

    >>> order_in("| package | what it holds |\\n|---|---|\\n| `data` | sets |\\n")
    ['data']
    """
    table = text.split("| package | what it holds |\n", 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.M)


ORDER = order_in((ROOT / "CONTRIBUTING.md").read_text("utf-8"))


def imported(source):
    """Return the packages of fissile that a module imports, anywhere in its code."""
    packages = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            names = [f"{node.module}.{name.name}" for name in node.names]
        packages |= {name.split(".")[1] for name in names if name.startswith("fissile.")}
    return packages


def steps_back(package, source, order):
    """Return the packages that a module of `package` may not import, and does."""
    below = order[order.index(package) + 1 :]
    return sorted(imported(source) & set(below))


def test_the_table_lists_every_package():
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert sorted(ORDER) == sorted(packages)


def test_the_top_level_fits_on_a_screen():
    entries = [path for path in SOURCE.iterdir() if path.name not in ("py.typed", "__pycache__")]
    assert len(entries) <= MOST_ENTRIES
    assert [path.name for path in entries if path.suffix == ".py"] == ["__init__.py"]


@pytest.mark.parametrize("package", ORDER)
def test_a_package_imports_only_what_stands_above_it(package):
    wrong = {
        str(path.relative_to(SOURCE)): steps
        for path in (SOURCE / package).rglob("*.py")
        if (steps := steps_back(package, path.read_text("utf-8"), ORDER))
    }
    assert not wrong


@pytest.mark.parametrize(
    "line", ["from fissile.lab import run", "import fissile.lab.run", "from fissile import lab"]
)
def test_a_step_backwards_is_noticed(line):
    source = f"def later():\n    {line}\n"
    assert steps_back("layers", source, ["layers", "lab"]) == ["lab"]
    assert steps_back("lab", source, ["layers", "lab"]) == []


def without_example(module):
    """Return the public functions and classes of a module whose docstring shows no call of them."""
    names = []
    for name in pins.public(module):
        value = getattr(importlib.import_module(module), name)
        if inspect.isfunction(value) or inspect.isclass(value):
            # A class must not borrow its parent's docstring.
            text = inspect.cleandoc(vars(value).get("__doc__") or value.__doc__ or "")
            first, _, rest = text.partition("\n")
            if not first.endswith((".", ":")) or not re.search(r">>>|^    \S|```", rest, re.M):
                names.append(name)
    return names


@pytest.mark.parametrize("module", pins.PUBLIC)
def test_every_public_name_has_an_example(module):
    assert not without_example(module)
