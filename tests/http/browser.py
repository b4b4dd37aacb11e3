"""Headless Chromium, spoken to over its debugging pipe: no driver and no library.

One Browser is one process and one page. wait_for() asks the page again until it says yes: what a
page shows has no event that a test could wait for.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)
WHY_NOT = "needs Chromium: apt-get install chromium"
ANSWER_S = 30.0


class Browser:
    def __init__(self, process: "subprocess.Popen[bytes]", send: IO[bytes], hear: IO[bytes]):
        self._process = process
        self._send = send
        self._hear = hear
        self._number = 0
        self._session: str | None = None
        self.asked: list[str] = []  # every address that the page asked for
        self.complaints: list[str] = []  # uncaught errors and console errors
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        frame = bytearray()
        while byte := self._hear.read(1):
            if byte == b"\0":
                message: dict[str, Any] = json.loads(frame)
                return message
            frame += byte
        raise AssertionError(f"Chromium ended with {self._process.wait()}")

    def _note(self, event: dict[str, Any]) -> None:
        details = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.asked.append(details["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(details["exceptionDetails"]))
            case "Log.entryAdded" if details["entry"]["level"] == "error":
                self.complaints.append(str(details["entry"]))
            case _:
                pass

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def value(self, script: str) -> Any:
        """Of a JavaScript expression."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 15.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := self.value(script)):
            if time.monotonic() > deadline:
                body = self.value("document.body.innerText")
                raise AssertionError(f"not within {timeout_s} s: {script}\n{body}")
            time.sleep(0.05)
        return found

    def screenshot(self, path: Path) -> None:
        metrics = self.call("Page.getLayoutMetrics")["cssContentSize"]
        area = {"x": 0, "y": 0, "width": metrics["width"], "height": metrics["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=area, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    assert FOUND is not None
    to_us, from_it = os.pipe()
    from_us, to_it = os.pipe()
    with tempfile.TemporaryDirectory(prefix="rlt-b", ignore_cleanup_errors=True) as profile:
        arguments = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe"),
            f"--user-data-dir={profile}",
        ]
        # It reads from descriptor 3 and writes to 4.
        shell = f'exec "$0" "$@" 3<&{from_us} 4>&{from_it} {from_us}<&- {from_it}>&-'
        process = subprocess.Popen(
            ["bash", "-c", shell, FOUND, *arguments, "about:blank"],
            pass_fds=(from_us, from_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(from_it)
        with os.fdopen(to_it, "wb") as send, os.fdopen(to_us, "rb") as hear:
            try:
                yield Browser(process, send, hear)
            finally:
                process.terminate()
                try:
                    process.wait(10.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
