"""A real browser on a real JupyterLab: starts both on loopback, opens notebooks, runs them and moves their controls."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

ARTEFACTS = Path(__file__).resolve().parents[1] / "build" / "browser"
_TOKEN = "for-tests-on-loopback-only"
_CHROMIUM = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
             "--disable-component-update --disable-sync --no-proxy-server").split()  # fmt: skip
_LOOPBACK_ONLY = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
_SERVER = """
    --no-browser --allow-root --ServerApp.ip=127.0.0.1 --ServerApp.port_retries=0 --LabApp.news_url=None
    --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate --LabApp.extension_manager=readonly
    --LabApp.expose_app_in_browser=True --ServerApp.terminals_enabled=False --LanguageServerManager.autodetect=False
""".split()


def chromium() -> str:
    """Return the path of Chromium; without one the test is skipped, or fails where CI=true says that it must run."""
    found = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
    if found is None:
        reason = "no Chromium here: `make browser` installs it where apt and root are at hand"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@dataclass
class Seen:
    """What a page complained about: messages of the console, exceptions, requests that left the machine."""

    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


@contextmanager
def browser_page() -> Iterator[tuple[Page, Seen]]:
    """Yield a page of a headless Chromium that reaches nothing but this machine, and what it complains about."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=[*_CHROMIUM, _LOOPBACK_ONLY])
        page = browser.new_page(viewport={"width": 1500, "height": 1400})
        page.set_default_timeout(30_000)
        seen = Seen()
        page.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: seen.errors.append(str(e)))

        def note(request: Any) -> None:
            if not request.url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:", "file:", "about:")):
                seen.outside.append(request.url)

        page.on("request", note)
        try:
            yield page, seen
        finally:
            browser.close()


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab on a folder of notebooks."""

    address: str
    folder: Path

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Call the server's REST interface; return what it answers, None for an empty answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {_TOKEN}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            content = answer.read()
        return json.loads(content) if content else None


@contextmanager
def jupyter_lab(folder: Path, environment: dict[str, str]) -> Iterator[Lab]:
    """Start JupyterLab on a free loopback port with settings of its own; it ends with its kernels."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = folder / ".home"
    settings = home / "config" / "lab" / "user-settings" / "@jupyterlab"
    for name, value in (
        ("docmanager-extension/plugin", {"autosave": False}),
        ("notebook-extension/tracker", {"windowingMode": "none"}),
        ("apputils-extension/notification", {"fetchNews": "false", "checkForUpdates": False}),
    ):
        path = settings / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    own = {"HOME": str(home), "JUPYTERLAB_SETTINGS_DIR": str(settings.parent)}
    own |= {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    command = [sys.executable, "-m", "jupyterlab", *_SERVER, f"--ServerApp.port={port}"]
    command += [f"--IdentityProvider.token={_TOKEN}", f"--ServerApp.root_dir={folder}"]
    log = (folder / "server.log").open("w")
    server = subprocess.Popen(
        command, cwd=folder, env=os.environ | own | environment, stdout=log, stderr=log, start_new_session=True
    )
    lab = Lab(f"http://127.0.0.1:{port}", folder)
    try:
        _until_it_answers(lab, server)
        yield lab
    finally:
        _stop(lab, server)
        log.close()


def _until_it_answers(lab: Lab, server: subprocess.Popen) -> None:
    for _ in range(300):
        assert server.poll() is None, (lab.folder / "server.log").read_text()[-3000:]
        try:
            lab.request("GET", "/api/status")
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("JupyterLab did not answer within 30 s")


def _stop(lab: Lab, server: subprocess.Popen) -> None:
    try:
        for session in lab.request("GET", "/api/sessions"):
            lab.request("DELETE", f"/api/sessions/{session['id']}")
        lab.request("POST", "/api/shutdown")
        server.wait(15)
    except (OSError, subprocess.TimeoutExpired):
        server.kill()
        server.wait()


class OpenNotebook:
    """A notebook that is open in the page, with a kernel of its own."""

    def __init__(self, page: Page, lab: Lab, name: str) -> None:
        self.page = page
        kernel = {"name": name, "path": name, "type": "notebook", "kernel": {"name": "python3"}}
        lab.request("POST", "/api/sessions", kernel)
        page.goto(f"{lab.address}/lab/tree/{name}?reset&token={_TOKEN}")
        # the page says "idle" before there is a kernel, so the application itself is asked
        page.wait_for_function(
            """() => {
                const app = window.jupyterapp, panel = app && app.shell.currentWidget;
                const kernel = panel && panel.sessionContext && panel.sessionContext.session
                    && panel.sessionContext.session.kernel;
                return kernel && panel.sessionContext.isReady && kernel.connectionStatus === 'connected'
                    && kernel.status === 'idle' && panel.content.widgets.length > 0;
            }"""
        )

    def run_all(self, timeout: float = 60.0) -> None:
        """Run all cells and wait until they are done."""
        self.page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        self.page.wait_for_function(
            """() => window.jupyterapp.shell.currentWidget.content.widgets.every(c => c.model.type !== 'code'
                || !c.model.sharedModel.source.trim() || c.model.executionCount !== null)""",
            timeout=timeout * 1000,
        )
        self.settle()

    def outputs(self) -> list[dict[str, Any]]:
        """Return the outputs of all code cells, as notebook JSON."""
        return self.page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets
                .filter(c => c.model.type === 'code').flatMap(c => c.model.outputs.toJSON())"""
        )

    def settle(self) -> None:
        """Wait until the kernel, and the thread beside it that serves widgets, have answered all that was sent."""
        self.page.evaluate(
            """async () => {
                const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                const idle = () => new Promise(r => setTimeout(r, 60));
                await idle();
                while (kernel.status !== 'idle') await idle();
            }"""
        )

    def text(self, selector: str) -> str:
        """Return the text of the first element that matches."""
        return self.page.locator(selector).first.inner_text()

    def wait_for_text(self, selector: str, text: str) -> None:
        """Wait until the element holds a text; where it never does, say what it holds."""
        found = "([s, t]) => { const e = document.querySelector(s); return e && e.innerText.includes(t); }"
        try:
            self.page.wait_for_function(found, arg=[selector, text], timeout=15_000)
        except PlaywrightTimeout:
            ARTEFACTS.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=ARTEFACTS / "failed.png")
            held = self.page.locator(selector).all_inner_texts()
            raise AssertionError(f"{selector} should hold {text!r}, and holds {held}") from None

    def choose(self, name: str, label: str) -> None:
        """Choose an entry of the drop-down list in a widget with class `name`."""
        self.page.locator(f".{name} select").select_option(label=label)

    def screenshot(self, name: str, selector: str) -> Path:
        """Keep a picture of an element in the folder of artefacts."""
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        path = ARTEFACTS / f"{name}.png"
        self.page.locator(selector).first.screenshot(path=path)
        return path


def check_offline_page(path: Path) -> None:
    """Check that a self-contained HTML file opens without complaints and asks for nothing outside itself."""
    with browser_page() as (page, seen):
        page.goto(path.resolve().as_uri())
        assert page.locator("body").inner_text().strip()
        assert not seen.errors, seen.errors
        assert not seen.outside, seen.outside
