from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="session")
def chromium() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(
            f"no Chromium on this machine (looked for {', '.join(NAMES)}); install it to test the page in a browser"
        )
    return found


@pytest.fixture
def dump(chromium: str, tmp_path: Path) -> Callable[[Path, int], str]:
    """Open a page headless at a width, without any network, let its scripts run, and return its document as text."""

    def run(page: Path, width: int) -> str:
        done = subprocess.run(
            [
                chromium,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                "--virtual-time-budget=20000",
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--window-size={width},2000",
                "--dump-dom",
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | {"HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run
