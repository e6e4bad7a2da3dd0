"""The page of `fissile play` in a real browser: numbers, drawings, and when things go wrong."""

import base64
import io
import json
import re
import shutil
import threading
import time
import xml.etree.ElementTree as ET
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from chromium import FAINTEST, SIZES, STICKING_OUT, WIDTHS, needed, opened, show
from PIL import Image
from play_server import playing

from fissile.lab.stats import interval
from fissile.play import PRESETS, Settings, events, server
from fissile.play.settings import python

pytestmark = needed

ROOT = Path(__file__).parents[2]
PAGE = Path(server.__file__).parent / "page"

SMALL = {"samples": "600", "trials": "3", "warm_up": "2", "fine_tune": "3"}
SETTLED = """
const main = document.querySelector("main");
const asked = document.querySelector("#asked").textContent;
return !main.classList.contains("waiting") && /trained in|computed/.test(asked);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def place():
    with playing() as found:
        yield found


@pytest.fixture(autouse=True)
def without_complaints(browser):
    browser.get_log("browser")
    yield
    entries = [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]
    # A server that was stopped on purpose cannot be reached.
    assert [e for e in entries if "WebSocket connection to" not in e["message"]] == []


def until(browser, script, seconds=40):
    end = time.monotonic() + seconds
    while not (found := browser.execute_script(script)):
        assert time.monotonic() < end, browser.execute_script("return document.body.innerText")
        time.sleep(0.02)
    return found


def go(browser, place, size="desktop", scheme="light", **settings):
    words = "&".join(f"{name}={value}" for name, value in (SMALL | settings).items())
    browser.get("about:blank")  # another fragment alone would not load the page anew
    show(browser, f"{place.address}#{words}", *SIZES[size], scheme=scheme)
    until(browser, SETTLED)


def numbers(browser):
    script = """return Object.fromEntries([...document.querySelectorAll("[data-number]")]
        .map((cell) => [cell.dataset.number, cell.textContent]))"""
    return browser.execute_script(script)


def found(browser, selector):
    return browser.find_element("css selector", selector)


def expected(**settings):
    """Return what the table must show, from the bank called directly."""
    space = {}
    exec(python(Settings.read(SMALL | settings)).replace("print(", "("), space)
    arms, percent = space["arms"], 100 * space["accuracy"].double()
    told = {}
    for place, name in enumerate(member.name for member in arms.members[: percent.shape[1]]):
        column = percent[:, place]
        error = column.std() / len(column) ** 0.5
        told[f"accuracy {name}"] = f"{column.mean():.2f} ± {error:.2f}"
        told[f"nonzeros {name}"] = f"{arms.nonzeros[place]:,}"
        if place:
            gains = column - percent[:, 0]
            low, high = interval(gains)
            told[f"gain {name}"] = f"{gains.mean():+.2f} [{low:+.2f}, {high:+.2f}]".replace(
                "-", "−"
            )
    return told


def test_a_moved_slider_shows_the_numbers_of_the_bank(browser, place):
    go(browser, place)
    shown = numbers(browser)
    wanted = expected()
    assert {name: shown[name] for name in wanted} == wanted
    found(browser, "input[name=neurons]").send_keys("\ue014" * 3)  # three to the right
    until(browser, SETTLED)
    assert "neurons=11" in browser.current_url
    shown, wanted = numbers(browser), expected(neurons="11")
    assert {name: shown[name] for name in wanted} == wanted
    found(browser, "input[value=gram]").click()
    until(browser, SETTLED)
    wanted = expected(neurons="11", splits="clause,random,gram")
    shown = numbers(browser)
    assert {name: shown[name] for name in wanted} == wanted
    assert found(browser, "#python").text == python(
        Settings.read(SMALL | {"neurons": "11", "splits": "clause,random,gram"})
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_fits_the_screen_and_can_be_read(browser, place, size, scheme):
    go(browser, place, size, scheme, splits="clause,random,overlapping")
    scroll, inner = browser.execute_script(WIDTHS)
    assert scroll <= inner == SIZES[size][0]
    assert browser.execute_script(STICKING_OUT) == []
    assert browser.execute_script(FAINTEST) >= 4.5
    unnamed = """return [...document.querySelectorAll("input, select, button, svg[role=img], [tabindex]")]
      .filter((one) => !(one.labels?.length || one.ariaLabel || one.textContent.trim() || one.closest("[aria-label]")))
      .map((one) => one.outerHTML)"""  # noqa: E501
    assert browser.execute_script(unnamed) == []


def test_pictures_are_drawn(browser, place):
    go(browser, place, task="digits", splits="random,gram", neurons="4", alpha="4")
    shown, wanted = (
        numbers(browser),
        expected(task="digits", splits="random,gram", neurons="4", alpha="4"),
    )
    assert {name: shown[name] for name in wanted} == wanted
    assert browser.execute_script("return document.querySelectorAll('#weights .row').length") == 16
    assert not found(browser, "#gram").is_displayed()
    assert browser.execute_script(STICKING_OUT) == []


def test_the_keyboard_moves_through_the_networks(browser, place):
    go(browser, place)
    weights = found(browser, "#weights")
    weights.send_keys("\ue014")
    first = found(browser, "#readout").text
    assert first.startswith("Neuron 1, literal 1 of clause 1:")
    weights.send_keys("\ue014\ue015")
    assert found(browser, "#readout").text.startswith("Neuron 2, literal 2 of clause 1:")
    weights.send_keys("\ue00c")
    assert found(browser, "#readout").text == ""


def test_the_pointer_tells_of_a_clause_and_of_a_neuron(browser, place):
    go(browser, place, splits="clause")
    over = """const hit = [...document.querySelectorAll("#weights .hit")]
        .find((one) => one.which[arguments[0]] === 2);
      hit.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
      return document.querySelector("#readout").textContent"""
    assert browser.execute_script(over, "clause").startswith("Clause 3 stays whole in ")
    told = browser.execute_script(over, "neuron")
    counts = list(map(int, re.findall(r"\d+", told)))
    assert counts[:2] == [3, 32]
    assert 30 <= sum(counts[2:]) <= 32  # one or two may have been pruned


def test_the_split_goes_through_its_stages(browser, place):
    go(browser, place)
    drawn = """const svg = document.querySelector("#weights"); svg.classList.add("still");
      const seen = (name) => [...svg.querySelectorAll(name)].filter((one) => getComputedStyle(one).opacity > 0.5).length;
      return [svg.classList[0], seen(".lost") > 0, seen(".cut") > 0, seen(".tuned") > 0]"""  # noqa: E501
    wanted = [
        ["stage-0", True, True, False], ["stage-1", True, True, False],
        ["stage-2", False, True, False], ["stage-3", False, False, False],
        ["stage-4", False, False, True],
    ]  # fmt: skip
    for place_, want in enumerate(wanted):
        browser.execute_script(
            "document.querySelectorAll('#stages input')[arguments[0]].click()", place_
        )
        assert browser.execute_script(drawn) == want


def test_with_reduced_motion_nothing_moves(browser, place):
    go(browser, place)
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    found(browser, "#watch").click()
    moving = "return document.getAnimations().length"
    for _ in range(10):
        assert browser.execute_script(moving) == 0
        time.sleep(0.03)


def test_the_lens_computes_what_the_networks_compute(browser, place):
    go(browser, place)
    settings = Settings.read(SMALL)
    space = {}
    exec(python(settings).replace("print(", "("), space)
    for bits in ("1" * 8 + "0" * 24, "0111" * 8, "1" * 32):
        typed = found(browser, "#literals input")
        typed.clear()
        typed.send_keys(bits)
        x = torch.tensor([3.25 if bit == "1" else 0.25 for bit in bits])
        lines = [one.text for one in browser.find_elements("css selector", "#fires .verdict")]
        for row, line in enumerate(lines):
            net = space["arms"].take(row)[0]
            logit = net(x).item()
            if abs(logit) > 0.01:
                assert f"it says {'true' if logit > 0 else 'false'}" in line
                right = (logit > 0) == ("1111" in [bits[i : i + 4] for i in range(0, 32, 4)])
                assert ("right" in line) == right
    buttons = browser.find_elements("css selector", "#literals .clause button")
    assert len(buttons) == 32
    buttons[5].click()
    assert buttons[5].get_attribute("aria-pressed") == "false"
    samples = browser.find_elements("css selector", "#mistakes button")
    samples[0].click()
    assert "wrong" in found(browser, "#fires").text


def test_what_is_kept_holds_what_is_shown(browser, place):
    go(browser, place, scheme="dark")
    keep = """const done = arguments[0]; (async () => {
      const saved = {};
      const create = URL.createObjectURL;
      const blobs = new Map();
      URL.createObjectURL = (blob) => { const url = create(blob); blobs.set(url, blob); return url; };
      HTMLAnchorElement.prototype.click = function () { saved[this.download] = blobs.get(this.href); };
      for (const kind of ["svg", "png", "csv"]) document.querySelector(`[data-keep=${kind}]`).click();
      while (Object.keys(saved).length < 3) await new Promise((then) => setTimeout(then, 20));
      const bytes = new Uint8Array(await saved["fissile-play.png"].arrayBuffer());
      done({ svg: await saved["fissile-play.svg"].text(), csv: await saved["fissile-play.csv"].text(),
        png: btoa(bytes.reduce((text, one) => text + String.fromCharCode(one), "")) });
    })();"""  # noqa: E501
    got = browser.execute_async_script(keep)
    root = ET.fromstring(got["svg"])
    assert "color(" not in got["svg"]
    assert "var(" not in got["svg"]
    assert len(root.findall("{http://www.w3.org/2000/svg}svg")) == 3
    picture = Image.open(io.BytesIO(base64.b64decode(got["png"])))
    assert picture.width > 1000
    assert len(picture.convert("RGB").getcolors(1 << 24)) > 50
    rows = [line.split(",") for line in got["csv"].splitlines()]
    reported = [float(row[4]) for row in rows if row[3] == "reported" and row[0] == "clause-2"]
    assert numbers(browser)["accuracy clause-2"].startswith(f"{100 * sum(reported) / 3:.2f}")
    assert len([row for row in rows if row[0] == "dense" and row[3] != "reported"]) == 3 * 5


def test_the_address_holds_what_the_controls_show(browser, place):
    go(browser, place, l2="0.001", negatives="flip", splits="n:m")
    value = "return document.querySelector(arguments[0]).value"
    assert browser.execute_script(value, "[name=negatives]") == "flip"
    assert browser.execute_script(value, "[name=reading]") == "own"
    assert browser.execute_script(value, "[type=number][max='0.1']") == "1e-07"
    assert found(browser, "input[value='n:m']").is_selected()
    before = numbers(browser)
    browser.refresh()
    until(browser, SETTLED)
    assert numbers(browser) == before


def test_a_mistake_is_told_and_the_page_goes_on(browser, place):
    go(browser, place)
    browser.get(f"{place.address}#clauses=32&size=6")
    until(browser, "return document.querySelector('.problem').textContent.includes('literals')")
    found(browser, "#presets button").click()
    until(browser, SETTLED)
    assert "clauses" in found(browser, "#asked").text


def test_a_moved_slider_cancels_what_runs(browser, place):
    go(browser, place)
    browser.get(f"{place.address}#warm_up=400&fine_tune=400&samples=20000")
    until(browser, "return document.querySelector('#asked').textContent.includes(' of 800')")
    browser.get(f"{place.address}#{'&'.join(f'{k}={v}' for k, v in SMALL.items())}")
    until(browser, SETTLED)
    assert numbers(browser)["accuracy dense"] == expected()["accuracy dense"]
    end = time.monotonic() + 10
    while len(place.turns):
        assert time.monotonic() < end


def test_two_tabs_have_their_own_numbers(browser, place):
    go(browser, place)
    first = browser.current_window_handle
    browser.switch_to.new_window("tab")
    second = browser.current_window_handle
    go(browser, place, neurons="4")
    one = numbers(browser)
    browser.switch_to.window(first)
    assert numbers(browser) != one
    browser.switch_to.window(second)
    browser.close()
    browser.switch_to.window(first)


def test_a_server_that_was_killed_is_told_of_and_the_page_comes_back(browser):
    with playing() as place:
        go(browser, place)
        port, before = place.port, numbers(browser)
    until(browser, "return !document.querySelector('#notice').hidden")
    assert "comes back by itself" in found(browser, "#notice").text
    found(browser, "input[name=neurons]").send_keys("\ue014")
    with playing(port):
        until(browser, "return document.querySelector('#notice').hidden")
        until(browser, SETTLED)
        assert numbers(browser) != before
        browser.get("about:blank")


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """The copy for the docs, as the site has it: the page's files beside the presets'."""
    folder = tmp_path_factory.mktemp("still")
    for path in (*(ROOT / "docs" / "still").iterdir(), *PAGE.iterdir()):
        shutil.copy(path, folder)
    handler = partial(Silent, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.parametrize("size", SIZES)
def test_the_still_copy_shows_every_preset_without_a_server(browser, still, size):
    browser.get("about:blank")
    show(browser, still, *SIZES[size])
    until(browser, SETTLED)
    about = json.loads((ROOT / "docs" / "still" / "about.json").read_text("utf-8"))
    looked_at = about["presets"] if size == "desktop" else about["presets"][-2:]
    for preset in looked_at:
        buttons = browser.find_elements("css selector", "#presets button")
        button = buttons[about["presets"].index(preset)]
        browser.execute_script("arguments[0].click()", button)
        until(browser, SETTLED)
        stored = json.loads((ROOT / "docs" / "still" / f"{preset['name']}.json").read_text("utf-8"))
        accuracy = stored[-1]["accuracy"]["dense"]
        mean = 100 * sum(accuracy) / len(accuracy)
        assert float(numbers(browser)["accuracy dense"].split()[0]) == pytest.approx(mean, abs=6e-3)
        assert browser.execute_script(STICKING_OUT) == []
    assert not found(browser, "#controls").is_displayed()


def test_the_still_copy_is_of_the_presets_there_are():
    folder = ROOT / "docs" / "still"
    about = json.loads((folder / "about.json").read_text("utf-8"))
    assert about.pop("still")
    assert [one["settings"] for one in about["presets"]] == [p.settings.changed() for p in PRESETS]
    assert [one["about"] for one in about["presets"]] == [p.about for p in PRESETS]
    names = {path.stem for path in folder.iterdir()}
    assert names == {"about"} | {preset.name for preset in PRESETS}
    stored = json.loads((folder / "start.json").read_text("utf-8"))[-1]
    *_, last = events(PRESETS[0].settings)
    for name in ("accuracy", "differences", "measures", "python"):
        assert last[name] == stored[name]
