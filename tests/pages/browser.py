"""Chromium without a window, driven over two pipes by its DevTools protocol: nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60.0


def found() -> str | None:
    """The browser of this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one tab. As a context manager it ends the browser."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="crossrail-browser-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        # The browser reads commands from descriptor 3 and writes to 4. Both ends are first moved out of their way.
        reading, writing = (os.dup(one) for one in (to_read, to_write))
        shell = f'exec "$0" "$@" 3<&{reading} 4>&{writing} {reading}<&- {writing}>&-'
        command = ["/bin/bash", "-c", shell, program, *options, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(reading, writing), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for one in (to_read, to_write, reading, writing):
            os.close(one)
        self._number = 0
        self._buffer = b""
        self._events: list[dict[str, Any]] = []
        target = next(one for one in self._call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *unused: object) -> None:
        os.close(self._write)  # it ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the tab and waits for its result."""
        return self._call(method, self._session, **parameters)

    def show(self, page: Path, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Loads a page at a width in pixels, and waits until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self._until(lambda: any(one.get("method") == "Page.loadEventFired" for one in self._events))

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression on the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, to: Path) -> None:
        """Writes the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16_000), "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        to.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer: list[dict[str, Any]] = []

        def answered() -> bool:
            answer.extend(one for one in self._events if one.get("id") == number)
            return bool(answer)

        self._until(answered)
        self._events = [one for one in self._events if one.get("id") != number]
        assert "error" not in answer[0], f"{method}: {answer[0]['error']}"
        result: dict[str, Any] = answer[0]["result"]
        return result

    def _until(self, true: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._read], [], [], left)[0], "the browser does not answer"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser ended"
            *whole, self._buffer = (self._buffer + piece).split(b"\0")
            self._events.extend(json.loads(one) for one in whole)
