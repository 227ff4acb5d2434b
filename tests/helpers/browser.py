"""The system's own Chromium, without a window: what people see is what is tested."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@contextmanager
def opened(file: Path, seen: list[str], **device: Any) -> Iterator[Any]:
    """`file` as a playwright Page, once its charts are drawn; what the page asks the network for, dialogs, errors and
    refusals of its content policy are added to `seen`. Skips the test where no Chromium is installed."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=120_000)
        try:
            page = browser.new_page(**(device or DESKTOP))
            page.set_default_timeout(120_000)
            page.on("request", lambda one: one.url.startswith(("file:", "data:", "blob:")) or seen.append(one.url))
            page.on("pageerror", lambda error: seen.append(str(error)))
            page.on("console", lambda one: one.type in ("error", "warning") and seen.append(one.text))
            page.on("dialog", lambda one: (seen.append(one.message), one.dismiss()))
            page.goto(file.absolute().as_uri())
            page.wait_for_function("Bokeh.documents.length && Bokeh.documents.every((one) => one.is_idle)")
            yield page
        finally:
            browser.close()


INKED = """(box) => {
  const canvases = (node) => [...node.querySelectorAll("*")].flatMap((one) =>
    [...(one.tagName === "CANVAS" ? [one] : []), ...(one.shadowRoot ? canvases(one.shadowRoot) : [])]);
  const own = box.tagName === "CANVAS" ? [box] : canvases(box);
  return own.some((one) => {
    if (!one.width || !one.height) return false;
    const bytes = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
    const colours = new Set();
    for (let i = 0; i < bytes.length && colours.size < 9; i += 4)
      if (bytes[i + 3]) colours.add((bytes[i] << 16) | (bytes[i + 1] << 8) | bytes[i + 2]);
    return colours.size > 8;
  });
}"""
"""Whether an element is, or has below it, a canvas with more colours than a blank one has."""
