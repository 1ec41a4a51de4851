# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium that a test drives through WebDriver, and the tests' queries of a page."""

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

# A foreign site that makes its host name resolve to this machine.
EXTERNAL_HOST = "evil.example"

needs_browser = pytest.mark.skipif(
    bool(MISSING), reason=f"there is no browser: no {', '.join(MISSING)}"
)


class Browser:
    """A browser with one page at a time. If ``width`` is below 700, it emulates a phone with
    touch."""

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
        """Return the result of a function body that runs in the page."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str = "body") -> str:
        """Return the visible text of an element; "" if it does not exist."""
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
        """Send keys, by name or as characters, to the focused element."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        chain = ActionChains(self.driver)
        for key in keys:
            chain.send_keys(getattr(Keys, key, key))
        chain.perform()

    def console_errors(self) -> list[str]:
        """Return the errors that the browser's console has logged since the last call."""
        log = self.driver.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: str) -> None:
        self.driver.get_screenshot_as_file(path)


@contextmanager
def browser(folder: str) -> Iterator[Browser]:
    """Yield a browser. ``folder`` contains its files."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for option in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",  # containers have little of it
        "--disable-background-networking",
        "--no-first-run",
        f"--host-resolver-rules=MAP {EXTERNAL_HOST} 127.0.0.1",
        f"--user-data-dir={folder}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # root has no sandbox
    ):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_page_load_timeout(SECONDS_MAX)
        yield Browser(driver)
    finally:
        driver.quit()
