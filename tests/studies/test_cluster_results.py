"""What the documentation says of clusters is what was measured."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def page(name):
    return (ROOT / "docs" / name).read_text("utf-8")


@pytest.fixture
def docs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "scripts")
    import cluster

    return cluster


def test_the_included_files_are_made_from_the_results(docs):
    for name, make in docs.FILES.items():
        assert make() == page(f"parts/cluster-{name}.md"), f"{name}: run docs/scripts/cluster.py"
        assert f"<!-- include: docs/parts/cluster-{name}.md -->" in page("cluster.md")
