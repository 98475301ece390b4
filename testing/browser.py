"""A Chromium without a window, driven over its DevTools protocol, for tests and pictures of pages.

Chromium reads commands from file descriptor 3 and answers on 4, each message with a zero byte behind it. So nothing but
a browser has to be installed: on Debian, ``apt-get install chromium`` or the smaller ``chromium-headless-shell``.
"""

import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    # Containers run tests as root, where Chromium's sandbox does not start. The pages are our own.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_KEYS = {"Escape": 27, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def executable() -> str | None:
    """Returns the path of an installed Chromium; None if there is none."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


class BrowserError(RuntimeError):
    """The browser or a script in its page failed."""


class Browser:
    """One page in a browser."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._number = 0
        self._session = ""
        self._unread: list[dict[str, Any]] = []
        self.problems: list[str] = []
        """What the console showed as an error or a warning, and errors that nothing caught."""
        self.requests: list[str] = []
        """Addresses of everything that the page asked for, itself included."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        assert self._process.stdin is not None
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        self._process.stdin.write(json.dumps(command).encode() + b"\0")
        self._process.stdin.flush()
        while True:
            message = self._read()
            if message.get("id") == self._number:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._note(message)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        parts = bytearray()
        while (byte := self._process.stdout.read(1)) != b"\0":
            if not byte:
                raise BrowserError("the browser has ended")
            parts += byte
        return json.loads(parts)

    def _note(self, event: dict[str, Any]) -> None:
        self._unread.append(event)
        told = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(told["exceptionDetails"]))
        elif event["method"] == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(told["args"]))
        elif event["method"] == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(told["entry"]["text"])

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file, and forgets what was noted of the one before."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.problems.clear()
        self.requests.clear()
        self._unread.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._unread):
            self._note(self._read())

    def evaluate(self, script: str) -> Any:
        """Returns the value of a script in the page; waits for it if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def frame(self) -> None:
        """Waits until the page has drawn what is due."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Sends an event of the mouse: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frame()

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def key(self, name: str) -> None:
        """Presses and releases a key, such as + or ArrowLeft."""
        code = _KEYS.get(name, 0)
        text = {} if code else {"text": name}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)
        self.frame()

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """Writes what one sees as PNG; the whole page if ``height`` is None, else as many pixels from its top."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def browser(path: str) -> Iterator[Browser]:
    """Starts the browser at ``path``, and ends it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        # The shell makes the pipes of standard input and output descriptors 3 and 4.
        words = ["sh", "-c", 'exec "$@" 3<&0 4>&1 >/dev/null', "sh", path, *FLAGS, f"--user-data-dir={folder}"]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            yield Browser(process)
        finally:
            process.kill()
            process.wait()
