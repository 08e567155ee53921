"""A real browser, Debian's Chromium, for tests of pages."""

import contextlib

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

DRIVER = "/usr/bin/chromedriver"


@contextlib.contextmanager
def browser(width: int = 1000, height: int = 800):
    """Yield a browser. The test fails if a page logs anything to the console."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    try:
        yield driver
        assert [entry["message"] for entry in driver.get_log("browser")] == []
    finally:
        driver.quit()
