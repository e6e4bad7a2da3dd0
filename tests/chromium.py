"""Chromium, driven by chromedriver: how tests start it, and what they ask of every page."""

import contextlib
import importlib.util
import os
import shutil

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
FOUND = bool(CHROMIUM and DRIVER and importlib.util.find_spec("selenium"))
NEEDS = "needs Chromium, chromedriver (apt install chromium chromium-driver) and pip's selenium"

# Where tests are the point, a browser that is missing is a failure, not a reason to look away.
needed = pytest.mark.skipif(not FOUND and not os.environ.get("CI"), reason=NEEDS)

OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip
SIZES = {"phone": (390, 844, True), "desktop": (1280, 900, False)}

STICKING_OUT = """
const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
const inside = (element) => {
  for (let up = element.parentElement; up; up = up.parentElement) if (scrolls(up)) return true;
  return false;
};
return [...document.body.querySelectorAll("*")].filter((element) => {
  const box = element.getBoundingClientRect();
  return (box.right > innerWidth + 0.5 || box.left < -0.5) && !inside(element);
}).map((element) => element.outerHTML.slice(0, 200));
"""
#: The lowest contrast of all text with what lies behind it, as the accessibility rules reckon.
FAINTEST = """
const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
const clear = (colour) => parts(colour).length > 3 && parts(colour)[3] < 1;
const ground = (element) => {
  const colour = getComputedStyle(element).backgroundColor;
  return clear(colour) ? ground(element.parentElement) : colour;
};
const light = (colour) => parts(colour).slice(0, 3).map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0.05);
const texts = [...document.body.querySelectorAll("*")].filter((element) =>
  [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
return Math.min(...texts.map((element) => {
  const both = [light(getComputedStyle(element).color), light(ground(element))];
  return Math.max(...both) / Math.min(...both);
}));
"""
WIDTHS = "return [document.documentElement.scrollWidth, innerWidth]"


@contextlib.contextmanager
def opened(profile):
    """Start a browser with an empty profile in this folder."""
    assert FOUND, NEEDS
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def show(browser, page, width, height, mobile=False, media="screen", scheme="light"):
    """Open the page anew on a screen of this size."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get(page if isinstance(page, str) else page.as_uri())
