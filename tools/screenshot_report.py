"""Open a report page in headless Chromium, measure it and take pictures of it.

    python tools/screenshot_report.py folder/report.html --out /tmp/pictures

At 1280 and 400 pixels, light and dark: a PNG of the whole page and a JSON line with its scroll
width, requests beside its own file, chart texts that leave their chart or lie on another, and the
smallest chart text in pixels. Exits with 1 if the page is too wide or requests anything. Needs
`chromium` on the PATH; speaks DevTools over a pipe, as no Chromium window is 400 pixels wide.
"""

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
          "--disable-background-networking", "--remote-debugging-pipe")  # fmt: skip
_MEASURE = """(() => {
  const out = [], over = [], sizes = [];
  for (const svg of document.querySelectorAll('svg')) {
    const texts = [...svg.querySelectorAll('text')], place = t => t.getBoundingClientRect();
    const box = place(svg), scale = box.width / svg.viewBox.baseVal.width, rects = texts.map(place);
    rects.forEach((a, i) => {
      sizes.push(parseFloat(getComputedStyle(texts[i]).fontSize) * scale);
      if (Math.min(a.left - box.left, box.right - a.right, a.top - box.top, box.bottom - a.bottom)
          < -1) out.push(texts[i].textContent);
      rects.slice(0, i).forEach((b, j) => {
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4)
          over.push(texts[i].textContent + ' | ' + texts[j].textContent); }); }); }
  const {scrollWidth, scrollHeight} = document.scrollingElement;
  return JSON.stringify({scroll_width: scrollWidth, height: scrollHeight, clipped_texts: out,
    overlapping_texts: over, smallest_text_px: Math.min(...sizes)}); })()"""


class Browser:
    """A Chromium page, driven by DevTools messages; notes what the page requests."""

    def __init__(self, to_browser: IO[bytes], from_browser: IO[bytes]) -> None:
        """Open an empty page."""
        self._to, self._from, self._last_id = to_browser, from_browser, 0
        self._session, self.requests = dict[str, str](), list[str]()
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        _ = self.send("Page.enable"), self.send("Network.enable")

    def send(self, method: str, **params: object) -> dict[str, Any]:  # Any: the protocol's JSON
        """The answer to one command."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params, **self._session}
        self._to.write(json.dumps(message).encode() + b"\0")
        return self.wait("id", self._last_id)["result"]

    def wait(self, key: str, value: object) -> dict[str, Any]:
        """The next message in which `key` is `value`."""
        while True:
            text = bytearray()
            while (byte := self._from.read(1)) != b"\0":
                text += byte or sys.exit("error: the browser ended before its answer.")
            message = json.loads(text)
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            if message.get(key) == value:
                return message


def main() -> int:
    """Take every picture; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--out", required=True, type=Path, help="folder of the pictures")
    options = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None or not options.page.is_file():
        sys.exit(f"error: expected chromium on the PATH and a page, got {program}, {options.page}.")
    options.out.mkdir(parents=True, exist_ok=True)
    (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        shell = ["sh", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} 2>/dev/null', "sh", program]
        shell += [*_FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out))
        os.close(theirs_out)  # a dead browser then ends our reading
        try:
            browser = Browser(os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb"))
            shots = [(width, scheme) for width in (1280, 400) for scheme in ("light", "dark")]
            return max(picture(browser, options, *shot) for shot in shots)
        finally:
            process.terminate()
            process.wait()


def picture(browser: Browser, options: argparse.Namespace, width: int, scheme: str) -> int:
    """Write one PNG of the whole page and print its measures; 1 if it is too wide or asks."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.send("Emulation.setDeviceMetricsOverride", **size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.send("Emulation.setEmulatedMedia", features=[feature])
    browser.requests.clear()
    url = options.page.resolve().as_uri()
    browser.send("Page.navigate", url=url)
    browser.wait("method", "Page.loadEventFired")
    found = json.loads(browser.send("Runtime.evaluate", expression=_MEASURE)["result"]["value"])
    clip = {"x": 0, "y": 0, "width": width, "height": found["height"], "scale": 1}
    shot = browser.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    path = options.out / f"{options.page.stem}-{width}-{scheme}.png"
    path.write_bytes(base64.b64decode(shot["data"]))
    others = [request for request in browser.requests if request != url]
    print(json.dumps({"png": str(path), "width": width, **found, "requests": others}))
    return int(found["scroll_width"] > width or bool(others))


if __name__ == "__main__":
    sys.exit(main())
