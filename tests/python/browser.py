# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium that a test drives by its WebDriver, and what the tests ask of a page."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SECONDS_MAX = 60.0
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = [name for name, path in (("chromium", CHROMIUM), ("chromedriver", DRIVER)) if not path]

# A site of somebody else's, which leads its name to this machine.
ELSEWHERE = "evil.example"

needs_browser = pytest.mark.skipif(
    bool(MISSING), reason=f"there is no browser: no {', '.join(MISSING)}"
)


class Browser:
    """One page at a time. ``width`` below 700 is a phone's, with touch."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int = 1280, height: int = 900, theme: str = "light") -> None:
        self._command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self._command("Emulation.setEmulatedMedia", features=features)
        self.driver.get(url)

    def _command(self, name: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def ask(self, script: str, *arguments: Any) -> Any:
        """What a function's body returns in the page."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str = "body") -> str:
        """What is seen of an element; "" where there is none."""
        script = "return document.querySelector(arguments[0])?.innerText ?? ''"
        return str(self.ask(script, selector))

    def wait(self, is_so: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + SECONDS_MAX
        while not (found := is_so()):
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)
        return found

    def wait_for(self, words: str, selector: str = "body") -> str:
        self.wait(lambda: words in self.text(selector))
        return self.text(selector)

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def press(self, *keys: str) -> None:
        """Names of keys, or characters, to whatever has the focus."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        chain = ActionChains(self.driver)
        for key in keys:
            chain.send_keys(getattr(Keys, key, key))
        chain.perform()

    def complaints(self) -> list[str]:
        """What the browser's console has said of errors since it was asked last."""
        log = self.driver.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: str) -> None:
        self.driver.get_screenshot_as_file(path)


@contextmanager
def browser(folder: str) -> Iterator[Browser]:
    """``folder`` takes its files."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for option in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",  # which containers have little of
        "--disable-background-networking",
        "--no-first-run",
        f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1",
        f"--user-data-dir={folder}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # root has none
    ):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_page_load_timeout(SECONDS_MAX)
        yield Browser(driver)
    finally:
        driver.quit()
