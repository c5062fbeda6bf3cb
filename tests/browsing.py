"""A real Chromium for tests of pages."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.node.nodes import PATIENT_S
from tests.programs import needed_package, needed_program


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium, driver = needed_program("chromium"), needed_program("chromedriver")
    webdriver = needed_package("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    service = webdriver.ChromeService(executable_path=driver)
    chrome = webdriver.Chrome(options=options, service=service)
    yield chrome
    chrome.quit()


class Page:
    """A page in the browser. Calls block, so they run in a thread beside an event loop."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    def text(self, selector: str) -> str:
        """Of the first such element, or nothing."""
        script = "return document.querySelector(arguments[0])?.innerText ?? ''"
        return str(self._browser.execute_script(script, selector))

    def click(self, selector: str) -> None:
        self._browser.find_element("css selector", selector).click()

    def type(self, selector: str, keys: str) -> None:
        self._browser.find_element("css selector", selector).send_keys(keys)

    def run(self, script: str) -> Any:
        return self._browser.execute_script(script)

    def set_scheme(self, scheme: str) -> None:
        """scheme: light or dark"""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def resize(self, width: int, height: int) -> None:
        """In CSS pixels, as a phone has."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        self._browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)

    def open(self, url: str) -> None:
        self._browser.get(url)

    def until(self, selector: str, *words: str) -> str:
        until_s = time.monotonic() + PATIENT_S
        while not all(word in (text := self.text(selector)) for word in words):
            assert time.monotonic() < until_s, f"{selector}: {words} not in {text!r}"
            time.sleep(0.05)
        return text

    def count(self, selector: str) -> int:
        return len(self._browser.find_elements("css selector", selector))

    @property
    def errors(self) -> list[Any]:
        return [one for one in self._browser.get_log("browser") if one["level"] == "SEVERE"]
