"""Headless Chromium over the WebDriver protocol, which chromedriver speaks: nothing to install beside the two."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from helpers.patience import LONG

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that the WebDriver standard gives element references
ARGUMENTS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,900"
).split()


def missing() -> str:
    """Why no browser test can run here, "" if one can."""
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(names)} not installed" if names else ""


class Browser:
    """One window."""

    def __init__(self, session: str) -> None:
        self._session = session

    def command(self, method: str, path: str, body: Any = None) -> Any:
        """One WebDriver command; raises RuntimeError with the driver's words."""
        response = httpx.request(method, self._session + path, json={} if body is None else body, timeout=LONG)
        value = response.json()["value"]
        if response.is_error:
            raise RuntimeError(f"{path}: {value['error']}: {value['message'].splitlines()[0]}")
        return value

    def open(self, url: str) -> None:
        self.command("POST", "/url", {"url": url})

    def js(self, script: str, *args: Any) -> Any:
        """Run a function body; a promise that it returns is waited for."""
        return self.command("POST", "/execute/sync", {"script": script, "args": list(args)})

    def element(self, css: str) -> str:
        found: str = self.command("POST", "/element", {"using": "css selector", "value": css})[ELEMENT]
        return found

    def click(self, css: str) -> None:
        self.command("POST", f"/element/{self.element(css)}/click")

    def type(self, css: str, text: str) -> None:
        self.command("POST", f"/element/{self.element(css)}/value", {"text": text})

    def clear(self, css: str) -> None:
        self.command("POST", f"/element/{self.element(css)}/clear")

    def text(self, css: str) -> str:
        found: str = self.js("return document.querySelector(arguments[0])?.textContent ?? ''", css)
        return found

    def hover(self, css: str, x: int = 0, y: int = 0) -> None:
        """Move the pointer to an offset from the element's middle, in CSS pixels."""
        move = {"type": "pointerMove", "duration": 0, "x": x, "y": y, "origin": {ELEMENT: self.element(css)}}
        self.command("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def until(self, script: str, *args: Any, seconds: float = 60) -> Any:
        """Wait until a function body returns something true; returns that."""
        deadline = time.monotonic() + seconds
        while not (value := self.js(script, *args)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds} seconds: {script}")
            time.sleep(0.03)
        return value

    def screen(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """Pretend to be a screen of this size, in light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def picture(self, path: Path) -> None:
        """Save what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.command("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """What the page has logged as errors since the last call."""
        entries = self.command("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def _devtools(self, name: str, params: dict[str, Any]) -> None:
        self.command("POST", "/goog/cdp/execute", {"cmd": name, "params": params})


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A fresh window with an empty profile, closed at the end."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert driver.stdout is not None
        port = next(match[1] for line in driver.stdout if (match := re.search(r"successfully on port (\d+)", line)))
        options = {"args": [*ARGUMENTS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        url = f"http://127.0.0.1:{port}/session"
        made = httpx.post(url, json={"capabilities": {"alwaysMatch": wanted}}, timeout=LONG).json()["value"]
        if "sessionId" not in made:
            raise RuntimeError(f"Chromium has not started: {made}")
        try:
            yield Browser(f"{url}/{made['sessionId']}")
        finally:
            httpx.delete(f"{url}/{made['sessionId']}", timeout=LONG)
    finally:
        driver.terminate()
        driver.wait()
        if driver.stdout is not None:
            driver.stdout.close()
