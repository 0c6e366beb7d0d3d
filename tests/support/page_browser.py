"""A page in Chromium without a screen, driven by keys and read by scripts, in a process of its own.

`python page_browser.py PAGE WIDTH HEIGHT SCHEME` takes steps as JSON from stdin and prints what each gave, and what the
page said on its console: `{"key": "Tab"}` types, `{"run": "..."}` evaluates, `{"shot": "a.png"}` keeps a picture. The
browser is that of PyQt6-WebEngine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SECONDS = 60
_PAUSE_MS = 60
"""Between a step and the next: the page answers at once, in another process."""


def browse(
    page: Path, steps: Sequence[Mapping[str, str]], *, width: int = 1280, height: int = 1400, is_dark: bool = False
) -> tuple[list[Any], list[str]]:
    """Return what the steps gave, and the lines of the console."""
    words = [sys.executable, __file__, str(page), str(width), str(height), "dark" if is_dark else "light"]
    told = json.dumps(steps)
    done = subprocess.run(words, input=told, capture_output=True, text=True, timeout=2 * _SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["given"], answer["console"]


def _main(page: str, width: str, height: str, scheme: str) -> None:
    colours = "--blink-settings=preferredColorScheme=" + ("0" if scheme == "dark" else "1")
    os.environ |= {
        "QT_QPA_PLATFORM": "offscreen",
        "QTWEBENGINE_CHROMIUM_FLAGS": f"--no-sandbox --disable-gpu {colours}",
    }
    from PyQt6.QtCore import Qt, QTimer, QUrl
    from PyQt6.QtTest import QTest
    from PyQt6.QtWebEngineCore import QWebEnginePage
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    steps, given, console = json.load(sys.stdin), [], []

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level: object, message: str, line: int, source: str) -> None:  # noqa: N802
            console.append(message)

    application = QApplication(sys.argv[:1])
    view = QWebEngineView()
    shown = Page(view)
    view.setPage(shown)
    view.resize(int(width), int(height))
    view.show()

    def go_on(answer: object = None, *, is_answer: bool = True) -> None:
        if is_answer:
            given.append(answer)
        QTimer.singleShot(_PAUSE_MS, take)

    def take() -> None:
        if not steps:
            application.quit()
            return
        step = steps.pop(0)
        if "key" in step:
            modifier, _, key = step["key"].rpartition("+")
            held = Qt.KeyboardModifier.ShiftModifier if modifier else Qt.KeyboardModifier.NoModifier
            QTest.keyClick(view.focusProxy(), getattr(Qt.Key, f"Key_{key}"), held)
            go_on()
        elif "run" in step:
            shown.runJavaScript(step["run"], go_on)
        else:
            QTimer.singleShot(10 * _PAUSE_MS, lambda: go_on(view.grab().save(step["shot"])))

    def begin(_loaded: bool) -> None:
        view.focusProxy().setFocus()
        go_on(is_answer=False)

    shown.loadFinished.connect(begin)
    shown.load(QUrl.fromLocalFile(str(Path(page).resolve())))
    QTimer.singleShot(1000 * _SECONDS, lambda: application.exit(1))
    code = application.exec()
    sys.stdout.write(json.dumps({"given": given, "console": console}))
    sys.stdout.flush()
    os._exit(code)  # Qt takes its time to end


if __name__ == "__main__":
    _main(*sys.argv[1:])
