"""The README, the pages and the notebooks, run as they stand."""

import doctest
import importlib.util
import pkgutil
import re
import shlex
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from command import called
from nbclient import NotebookClient

import fissile
from fissile.bank import sparse
from fissile.expansion import split

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
PLACES = (str(ROOT), "/home/", "/root/", "/tmp/", "site-packages")


def script(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks for its own annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def own_splits(monkeypatch):
    """Splits that pages and docstrings register are gone afterwards."""
    monkeypatch.setattr(split, "_SPLITS", dict(split._SPLITS))


page_runner, include = script("run"), script("include")
PAGES = [page for page in include.pages() if page_runner.blocks(page.read_text("utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.filterwarnings("ignore:The '.*' does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
def test_a_page_runs_and_prints_what_it_shows(page, tmp_path):
    text = page.read_text("utf-8")
    with torch.random.fork_rng():
        printed = page_runner.run(text, page, tmp_path)
    for block, out in zip(page_runner.blocks(text), printed, strict=True):
        if block.shown is not None:
            assert page_runner.alike(block.shown, out), f"line {block.line}: printed\n{out}"


def test_the_studies_of_the_page_on_studies_run(tmp_path, monkeypatch):
    """Its files, the commands below them, and the mistake that it shows."""
    page = DOCS / "own-study.md"
    text = page.read_text("utf-8")
    assert len(text.split()) <= 1000
    page_runner.run(text, page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    shells = re.findall(r"^```sh\n(.*?)^```\n(?:\n^```text\n(.*?)^```)?", text, re.M | re.S)
    assert len(shells) == 3
    for commands, shown in shells:
        for line in commands.splitlines():
            out = called(*shlex.split(line, comments=True)[1:], COLUMNS="96").stdout
        assert not shown or page_runner.alike(shown, out), out
    told = " ".join(re.search(r"^error: (.*?)\n```", text, re.M | re.S)[1].split())
    source = Path("toy_models.py").read_text("utf-8")
    Path("toy_models.py").write_text(source.replace('Lines("dimensions"', 'Lines("dimension"'))
    err = called("run", "./toy_models.py", code=1).stderr
    assert " ".join(err.removeprefix("error: ").split()) == told


def test_few_blocks_are_left_out_and_each_says_why():
    blocks = [block for page in PAGES for block in page_runner.blocks(page.read_text("utf-8"))]
    assert len(blocks) > 40
    assert sum(block.why is not None for block in blocks) <= 3
    # A fence that the pattern does not see (indented, say) would never be run.
    fences = sum(page.read_text("utf-8").count("```python") for page in PAGES)
    assert fences == len(blocks)


def test_what_prints_is_shown():
    for page in PAGES:
        for block in page_runner.blocks(page.read_text("utf-8")):
            prints = re.search(r"^\s*(print|fissile\.summary)\(", block.code, re.M)
            assert not prints or block.shown, f"{page.name}, line {block.line}"


@pytest.mark.parametrize(
    ("shown", "printed", "good"),
    [
        ("264 weights, 83.1 %", "264  weights, 84.9 %\n", True),
        ("264 weights, 83.1 %", "265 weights, 83.1 %", False),
        ("264 weights, 83.1 %", "264 weights, 60.0 %", False),
        ("264 weights", "264 neurons", False),
        ("1,184", "1,184", True),
        ("tensor([-1, 0])", "tensor([1, 0])", False),
    ],
)
def test_outputs_are_compared_by_their_numbers(shown, printed, good):
    assert page_runner.alike(shown, printed) is good


def test_included_parts_are_the_files_they_name():
    for page in include.pages():
        text = page.read_text("utf-8")
        assert include.filled(text) == text, f"{page.name}: run python docs/scripts/include.py"
        for part in include.PART.finditer(text):
            assert (ROOT / part[2]).exists(), f"{page.name} includes {part[2]}, which is not there"


@pytest.mark.slow
def test_a_line_of_the_table_can_be_made_again():
    line = script("architectures").row("VGG-style")
    assert line.strip() in (DOCS / "parts" / "architectures.md").read_text("utf-8")


# Modules whose docstrings show what needs no files, no data and no other program.
MODULES = (
    "_common.errors", "_common.random", "data.dnf", "layers", "discovery", "expansion", "measure",
    "io.files", "bank.loop", "bank.sparse",
)  # fmt: skip


class Shown(doctest.OutputChecker):
    """Compares what is shown; an example that shows nothing only has to run."""

    def check_output(self, want, got, flags):
        return not want or super().check_output(want, got, flags)


def modules(name):
    """Import a module, and all below it where it is a package."""
    module = importlib.import_module(name)
    yield module
    for below in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
        yield importlib.import_module(below.name)


def examples():
    for name in MODULES:
        for module in modules(f"fissile.{name}"):
            yield from (test for test in doctest.DocTestFinder().find(module) if test.examples)


def setting():
    """The names that docstrings take for granted."""
    torch.manual_seed(0)
    dense = fissile.MLP([32, 8, 1])
    x = torch.rand(64, 32)
    y = (x[:, 0] > 0.5).long()
    layers = {"layer": torch.nn.ModuleList([fissile.MLP([8, 4, 2])])}
    return vars(fissile) | {
        "torch": torch, "nn": torch.nn, "fissile": fissile, "discover": fissile.discover,
        "drawer": fissile._common.random.drawer, "fit": fissile.bank.loop.fit,
        "Recipe": fissile.bank.loop.Recipe,
        "model": dense, "dense": dense, "wide": fissile.expand(dense, 2),
        "adam": torch.optim.Adam(dense.parameters()), "x": x, "y": y, "batches": [(x, y)],
        "x_test": x, "y_test": y,
        "loss": fissile.bank.loop.task_loss, "w1": torch.rand(4, 8), "w2": torch.rand(2, 4),
        "bert": torch.nn.ModuleDict({"encoder": torch.nn.ModuleDict(layers)}),
    }  # fmt: skip


@pytest.mark.parametrize("test", list(examples()), ids=lambda test: test.name)
def test_an_example_in_a_docstring_runs(test, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = setting()
    fissile.save(names["wide"], "wide.safetensors")
    if test.name.startswith("fissile.bank.sparse."):  # whose names are not all those of fissile
        names |= vars(sparse) | {"plan": sparse.Plan(400, direct=True), "seeds": [0, 1]}
    module = vars(sys.modules[test.globs["__name__"]])
    test.globs = names | {key: value for key, value in module.items() if key[:2] != "__"}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    told = []
    result = doctest.DocTestRunner(Shown(), False, flags).run(test, out=told.append)
    assert not result.failed, "".join(told)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("FISSILE_NOTEBOOK", "small")
    notebook = nbformat.read(path, as_version=4)
    # The kernel of this very environment, whatever others are installed.
    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    assert any("± " in str(cell.get("outputs")) for cell in notebook.cells)


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(fissile.FissileError, match=r"pip install .*\[files\]'"):
        fissile.save(fissile.MLP([4, 3, 1]), tmp_path / "m")
    data = fissile.bank.Data(*[torch.zeros(2, 4), torch.zeros(2).long()] * 2)
    bank = fissile.bank.Bank([fissile.bank.Spec([4, 3, 1], data)])
    with pytest.raises(fissile.FissileError, match=r"pip install .*\[bank\]'"):
        bank.train(until=1, progress=True)
