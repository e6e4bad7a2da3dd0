"""The report in a real browser: on a phone, on a desktop, in the dark and on paper."""

import base64
import json
import re
from pathlib import Path

import pytest
from chromium import FAINTEST, SIZES, STICKING_OUT, WIDTHS, needed, opened, show

from fissile.lab import report
from fissile.lab.run import run
from fissile.lab.store import Run, Store
from fissile.lab.studies import STUDIES

pytestmark = needed

PUBLISHED = Path(__file__).parents[2] / "results" / "index.html"
#: The width of a page between its margins, in pixels of CSS: what is wider is cut off in print.
BETWEEN_MARGINS = int((210 - 15 - 15) / 25.4 * 96)

CUT_OFF = """
return [...document.body.querySelectorAll("*")].filter((element) => {
  const hides = getComputedStyle(element).overflowX !== "visible";
  return hides && element.scrollWidth > element.clientWidth + 1;
}).map((element) => element.outerHTML.slice(0, 200));
"""
IMAGES = "return [...document.images].map((image) => [image.complete, image.naturalWidth])"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report with lines, heat-maps, pictures and a table beside the paper's."""
    folder = tmp_path_factory.mktemp("report")
    with Store(folder / "store") as store:
        for name in ("codes", "superposition", "capacity"):
            run(STUDIES[name].works("smoke"), store)
            store.note_run(Run(name, "smoke", None, {}, f"fissile run {name} {'x' * 200}"))
        return report.write(store, folder / "report")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_fits_the_screen(browser, page, size, scheme):
    show(browser, page, *SIZES[size], scheme=scheme)
    scroll, inner = browser.execute_script(WIDTHS)
    assert inner == SIZES[size][0]
    assert scroll <= inner
    assert browser.execute_script(STICKING_OUT) == []


@pytest.mark.parametrize("size", SIZES)
def test_every_figure_is_there(browser, page, size):
    show(browser, page, *SIZES[size])
    images = browser.execute_script(IMAGES)
    assert len(images) == 3
    assert all(complete and width > 0 for complete, width in images)


def test_a_phone_shows_wide_things_in_containers_that_scroll(browser, page):
    show(browser, page, *SIZES["phone"])
    assert any("beside" in element for element in browser.execute_script(CUT_OFF))


def test_dark_is_dark_and_figures_stay_on_white(browser, page):
    ground = "return getComputedStyle(document.querySelector(arguments[0])).backgroundColor"
    show(browser, page, *SIZES["desktop"])
    light = browser.execute_script(ground, "body")
    show(browser, page, *SIZES["desktop"], scheme="dark")
    dark = browser.execute_script(ground, "body")
    assert light == "rgb(255, 255, 255)"
    assert max(map(int, re.findall(r"\d+", dark))) < 64
    assert browser.execute_script(ground, ".card") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("media", ["screen", "print"])
def test_text_stands_out_from_what_is_behind_it(browser, page, media, scheme):
    show(browser, page, *SIZES["desktop"], media=media, scheme=scheme)
    assert browser.execute_script(FAINTEST) >= 4.5


def test_nothing_is_cut_off_on_paper(browser, page):
    show(browser, page, BETWEEN_MARGINS, 1000, media="print", scheme="dark")
    scroll, inner = browser.execute_script(WIDTHS)
    assert scroll <= inner == BETWEEN_MARGINS
    assert browser.execute_script(STICKING_OUT) == []
    assert browser.execute_script(CUT_OFF) == []


def test_the_published_report_fits_on_twenty_screens(browser):
    show(browser, PUBLISHED, *SIZES["desktop"])
    height = browser.execute_script("return document.documentElement.scrollHeight / innerHeight")
    assert height <= 20
    scroll, inner = browser.execute_script(WIDTHS)
    assert scroll <= inner


def test_it_prints(browser, page):
    show(browser, page, *SIZES["desktop"], media="print")
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    pdf = base64.b64decode(printed["data"])
    assert pdf.startswith(b"%PDF-")
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    assert pages >= 6  # the claims, and three studies with what is folded on a screen
    a4 = re.search(rb"/MediaBox\s*\[0 0 ([\d.]+) ([\d.]+)\]", pdf)
    assert [round(float(side) / 72 * 25.4) for side in a4.groups()] == [210, 297]


def test_nobody_is_called_and_nothing_is_complained_about(browser, page):
    for kind in ("performance", "browser"):
        browser.get_log(kind)  # what earlier tests did
    show(browser, page, *SIZES["desktop"])
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {
        message["params"]["request"]["url"]
        for message in sent
        if message["method"] == "Network.requestWillBeSent"
    }
    assert {url for url in asked if not url.startswith("data:")} == {page.as_uri()}
    serious = [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]
    assert serious == []
