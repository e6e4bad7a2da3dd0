"""The documentation as a reader meets it: its links, headings and pictures, and in Chromium."""

import http.server
import importlib
import json
import os
import re
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from chromium import FAINTEST, SIZES, WIDTHS, needed, opened, show

from fissile.lab.studies import STUDIES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
PLACES = (str(ROOT), "/home/", "/root/", "/tmp/", "site-packages", "/.venv/")
#: Pages of every kind: prose, code, tables, figures, cards, the reference.
SHOWN = (
    "", "start/", "tutorial/", "gallery/", "gallery/superposition/", "paper/", "claims-tables/",
    "packing-tables/", "frontier/", "contributing/", "architecture/", "reference/",
    "reference/cli/run/", "notebooks/see-superposition-go-away/",
)  # fmt: skip
#: Contrast of the page's own text; what the theme puts around it is the theme's.
FAINTEST_TEXT = FAINTEST.replace("document.body", 'document.querySelector(".md-content")')
LOADED = """
const images = [...document.images];
images.forEach((image) => { image.loading = "eager"; });
return Promise.all(images.map((image) => image.decode())).then(() => images.length);
"""


class Page(HTMLParser):
    """What a page has: the levels of its headings, and what stands for its pictures."""

    def __init__(self, text):
        super().__init__()
        self.levels, self.alts = [], []
        self.feed(text.split("<article", 1)[1].split("</article>", 1)[0])

    def handle_starttag(self, tag, attrs):
        if re.fullmatch(r"h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if tag == "img":
            self.alts.append(dict(attrs).get("alt") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=site)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


# --- the texts


def words(path):
    """Return how many words a page has, its code among them, but no comments."""
    return len(re.sub(r"<!--.*?-->", "", path.read_text("utf-8"), flags=re.S).split())


def test_no_page_is_long(monkeypatch):
    """Tables that need more room have pages of their own, which other pages link to."""
    monkeypatch.syspath_prepend(DOCS / "scripts")
    made = importlib.import_module("gallery").pages()
    assert all(len(text.split()) <= 1500 for text in made.values())
    pages = [path for path in DOCS.rglob("*.md") if path.parent.name != "parts"]
    assert len(pages) > 40
    tables = [path for path in pages if path.stem.endswith("-tables")]
    long = {path.name: words(path) for path in pages if path not in tables}
    assert {name: count for name, count in long.items() if count > 1500} == {}
    linked = "".join(path.read_text("utf-8") for path in pages if path not in tables)
    assert all(f"({path.name}" in linked for path in tables)


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 150
    rows = "".join("r" if line.startswith("|") else " " for line in lines).split()
    assert max(map(len, rows)) <= 8 + 2  # with the head and the rule below it


def slug(heading):
    """Return the anchor of a heading, as hosts of repositories make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_and_pictures_of_the_repository_s_own_pages_are_there(name):
    text = (ROOT / name).read_text("utf-8")
    for alt, link in re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text):
        if link.startswith("https:"):
            continue
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        assert not alt or path.endswith((".svg", ".png"))
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text("utf-8"), re.M)
            assert anchor in map(slug, headings), link
    assert all(len(alt.split()) >= 4 for alt in re.findall(r"!\[([^\]]*)\]", text))


# --- the site


@pytest.mark.slow
def test_the_site_needs_no_other_host_and_tells_no_place_of_its_maker(site):
    pages = [path.read_text("utf-8") for path in site.rglob("*.html")]
    assert len(pages) > 20
    for page in pages:
        fetched = re.findall(
            r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?://[^"]+)', page
        )
        assert not fetched
        assert not any(place in page for place in PLACES)
    reference = (site / "reference" / "index.html").read_text("utf-8")
    assert "expand" in reference
    assert ":func:" not in reference  # a role of Sphinx, left as it was
    assert "&gt;&gt;&gt; wide = expand" in re.sub(r"<[^>]+>", "", reference)
    assert (site / "results" / "figures" / "codes.png").exists()
    for path in NOTEBOOKS:
        page = (site / "notebooks" / path.stem / "index.html").read_text("utf-8")
        assert f"{path.stem}-0.png" in page
        assert (site / "notebooks" / path.name).exists()


@pytest.mark.slow
def test_headings_and_pictures_can_be_heard(site):
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    seen = {path: Page(text) for path in pages if "<article" in (text := path.read_text("utf-8"))}
    assert len(seen) > 70
    for path, page in seen.items():
        assert page.levels[0] == 1, path
        assert page.levels.count(1) == 1, path
        steps = zip(page.levels, page.levels[1:], strict=False)
        assert all(after <= before + 1 for before, after in steps), path
        assert all(len(alt.split()) >= 3 for alt in page.alts), (path, page.alts)


@pytest.mark.slow
def test_the_search_finds_options_and_studies(site):
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    found = " ".join(f"{one['title']} {one['text']}" for one in index["docs"])
    missing = [name for name in STUDIES if not re.search(rf"\b{name}\b", found)]
    assert not missing
    for option in (
        "--set",
        "--scale",
        "--reading",
        "--dtype",
        "--encoder",
        "optimizer=",
        "--workers",
    ):
        assert option in found


@pytest.mark.slow
@needed
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_pages_fit_the_screen_and_can_be_read(browser, address, size, scheme):
    show(browser, address, *SIZES[size], scheme=scheme)
    browser.execute_script("localStorage.clear()")
    for page in SHOWN:
        show(browser, address + page, *SIZES[size], scheme=scheme)
        theme = browser.execute_script("return document.body.dataset.mdColorScheme")
        assert theme == {"light": "default", "dark": "slate"}[scheme]
        scroll, inner = browser.execute_script(WIDTHS)
        assert scroll <= inner == SIZES[size][0], page
        assert browser.execute_script(LOADED) >= 0
        assert browser.execute_script(FAINTEST_TEXT) >= 4.5, page
