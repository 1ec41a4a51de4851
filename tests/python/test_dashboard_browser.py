# SPDX-License-Identifier: Apache-2.0
"""The dashboard in a real browser: every view, with mouse and keyboard, light and dark, on a phone,
and while a pool loses a worker; and the saved page of a plan."""

from __future__ import annotations

import http.server
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import EXTERNAL_HOST, Browser, browser, needs_browser
from pool_processes import PoolProcesses, pool_of
from shown_pools import FIRST, busy_status, large_plan, ledger, told_plan
from test_dashboard_server import TOKEN, port_of, served
from test_pool_status import worker
from torch import nn

from penstock.explanation.explanation import explain
from penstock.graph.plan_picture import BOXES_MAX
from penstock.live.pool_view import PoolAddress, pool_view
from penstock.live.pool_watch import PoolWatch

pytestmark = [pytest.mark.slow, pytest.mark.long, needs_browser]

VIEWS = ("overview", "workers", "steps", "plan", "bytes", "events")
# A folder for inspection afterwards.
SHOTS = os.environ.get("PENSTOCK_SCREENSHOTS", "")


@pytest.fixture
def page() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with browser(folder) as opened:
            yield opened


EVIL = "</script><img src=x onerror=alert(1)>"


class MadeWatch(PoolWatch):
    """The dashboard of a made-up pool: it has a ledger, a plan and ranks, without their
    programs."""

    def __init__(self) -> None:
        super().__init__(PoolAddress("tcp://127.0.0.1:1", None, 1.0))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._make)

    def start(self) -> None:
        for number in range(60):
            self._step(number, time.time() - 60 + number)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _ask_plan(self, trainer: str) -> str:
        return told_plan() if trainer == FIRST else ""

    def _make(self) -> None:
        number = 60
        while not self._is_over.wait(0.3):
            self._step(number, time.time())
            number += 1

    def _step(self, number: int, at: float) -> None:
        fields: dict[str, Any] = busy_status()
        seconds = {"compute": 3 + 0.6 * number, "dataset": 0.1 * number, "wire": 0.04 * number}
        fields["trainers"][0]["ledger"] = ledger(100 + 20 * number, **seconds)
        fields["trainers"][1]["batch_bytes"] = 2_000_000
        if number > 0:
            fields["workers"].append(worker(5, about=f"{EVIL}, process 1, x"))
        if number < 30:
            fields["workers"].append(worker(6))
        self.take(pool_view(fields, at))


class Scale(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.exp(values / 255)


class LargeWatch(MadeWatch):
    def _ask_plan(self, trainer: str) -> str:
        return large_plan().told(1 << 16)


@pytest.fixture
def made() -> Iterator[str]:
    """The address of a dashboard of a made-up pool."""
    with served(MadeWatch()) as site:
        yield site.url


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def shoot(page: Browser, name: str) -> None:
    if SHOTS:
        page.screenshot(f"{SHOTS}/{name}.png")


def test_every_view_is_reached_by_a_click(page: Browser, made: str) -> None:
    page.open(made)
    page.wait_for("train.py: Images")
    shown = {
        "overview": ("Batches per second", "Engine slurm: 4", "Tokens, rank 1 of 2"),
        "workers": ("node1/17", "draining", "Filter workers"),
        "steps": ("compute", "dataset", " steps"),
        "plan": ("3 of 5 calls run in the workers", "normalize", "2 calls are omitted"),
        "bytes": ("From workers to trainers", "node1", "gpu1", "network"),
        "events": ("worker joined", "worker node6/17 disappeared", "replanned"),
    }  # fmt: skip
    for name in VIEWS:
        page.click(f"nav a[href='#{name}']")
        for words in shown[name]:
            page.wait(lambda words=words: words in page.ask("return document.body.textContent"))
        assert page.ask("return document.querySelector('[aria-current=page]').hash") == f"#{name}"
        assert page.ask("return document.activeElement.id") == (
            "" if name == "overview" else "main"
        )
    page.driver.back()
    page.wait(lambda: page.text("h2") == "Bytes")
    assert page.console_errors() == []


def test_charts_plans_and_filters_respond_to_input(page: Browser, made: str) -> None:
    page.open(f"{made}#overview")
    page.wait_for("all: ")
    page.click(".tools button:nth-child(1)")
    assert page.ask("return document.querySelector('[aria-pressed=true]').innerText") == "1 min"
    page.ask("document.querySelector('svg.chart').focus()")
    page.press("ARROW_LEFT", "ARROW_LEFT")
    assert re.match(r"at \d\d:\d\d:\d\d: all \d", page.wait_for("at ", ".readout"))
    label = page.ask("return document.querySelector('svg.chart').getAttribute('aria-label')")
    assert re.search(r"^Batches per second, at .*all \d+\.\d.*; from .* to ", label)
    page.open(f"{made}#plan")
    page.wait_for("it depends on the batch alone")
    page.click(".node[data-index='2']")
    page.wait_for("to at model.py:12", ".detail")
    # Below hundreds of calls, the answer to a click was out of sight.
    assert (
        page.ask("return getComputedStyle(document.querySelector('.detail')).position") == "sticky"
    )
    page.press("ARROW_DOWN", "ARROW_DOWN")
    page.wait_for("it takes a parameter that is trained", ".detail")
    assert "normalize at model.py:13, tensor 1 of the batch" in page.text(".detail")
    page.ask("""
        const choice = document.querySelector('#plan-of');
        choice.selectedIndex = 1;
        choice.dispatchEvent(new Event('change'));
    """)
    page.wait_for("No plan reported")
    assert "model.py" not in page.text("#view")
    page.open(f"{made}#workers")
    page.wait_for("node4/17")
    page.click("input[type=search]")
    page.press(*"draining")
    page.wait(lambda: "node4/17" not in page.text() and "node3/17" in page.text())
    page.press(*"xyz")
    page.wait_for("No worker matches.")
    page.open(f"{made}#events")
    page.wait(lambda: page.ask("return document.querySelectorAll('.events li').length") > 0)
    page.click("label:has(input) input")
    page.wait(lambda: "joined" not in page.text(".events"))
    assert page.console_errors() == []


def test_large_plan_is_folded(page: Browser) -> None:
    """It was a box for each of 196 calls, ten thousand pixels high."""
    with served(LargeWatch()) as site:
        page.open(f"{site.url}#plan")
        page.wait_for("12 of 196 calls run in the workers")
        page.wait(lambda: page.ask("return document.querySelectorAll('.node').length") > 0)
        assert page.ask("return document.querySelectorAll('.node').length") <= BOXES_MAX
        label = page.ask("return document.querySelector('svg.drawing').getAttribute('aria-label')")
        assert label == "Plan: 12 of 196 calls run in the workers"
        page.click(".node[data-index='0']")
        page.press("END")
        page.wait_for("and 160 more calls", ".detail")
        assert "which training changes" in page.text(".detail")
        shoot(page, "large-plan")
    assert page.console_errors() == []


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 360)])
def test_saved_page_of_a_plan_shows_details_after_a_click(
    page: Browser, tmp_path: Path, theme: str, width: int
) -> None:
    layers = [layer for _ in range(25) for layer in (nn.Linear(64, 64), nn.ReLU())]
    plan = explain(nn.Sequential(Scale(), *layers), torch.zeros(8, 64), cut="maximal")
    path = tmp_path / "plan.html"
    path.write_text(plan.to_html(), encoding="utf-8")
    page.open(path.as_uri(), width=width, theme=theme)
    page.wait_for("2 of 52 calls run in the workers")
    page.wait(lambda: page.ask("return document.querySelectorAll('.node').length") == 3)
    page.click(".node[data-index='0']")
    page.wait_for("it depends on the batch", ".detail")
    page.press("END")
    page.wait_for("and 26 more calls", ".detail")
    assert "each reads one of these, which training changes" in page.text(".detail")
    assert "everything that can move: " in page.text(".facts")
    assert page.ask("return document.documentElement.scrollWidth - innerWidth") <= 0
    ground = page.ask("return getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(channels(ground)) < 0.3) == (theme == "dark")
    assert page.ask("return performance.getEntriesByType('resource').length") == 0
    shoot(page, f"saved-plan-{theme}")
    assert page.console_errors() == []


def test_controls_are_labelled_and_reachable_by_keyboard(page: Browser, made: str) -> None:
    page.open(made)
    page.wait_for("train.py: Images")
    page.press("TAB")
    assert page.ask("return document.activeElement.className") == "skip"
    page.press("TAB", "TAB", "TAB", "ENTER")
    page.wait(lambda: page.text("h2") == "Workers")
    for name in VIEWS:
        page.open(f"{made}#{name}")
        page.wait(lambda name=name: page.text("h2").lower() == name)
        page.wait_for("controller 22ab0000")
        unnamed = page.ask("""
            const named = (one) => one.innerText?.trim() || one.getAttribute('aria-label')
                || one.labels?.length || one.getAttribute('aria-hidden');
            return [...document.querySelectorAll('a, button, input, select, svg, [role]')]
                .filter((one) => one.checkVisibility() && !named(one)).map((one) => one.outerHTML)
        """)
        assert unnamed == [], name
        ids = page.ask("return [...document.querySelectorAll('[id]')].map((one) => one.id)")
        assert len(ids) == len(set(ids))


def channels(colour: str) -> list[float]:
    """Return the linear-light channels of an rgb() colour."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio as defined by WCAG."""
    light = sorted(
        (sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), channels(x), strict=True)) + 0.05)
        for x in (one, other)
    )
    return light[1] / light[0]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_contrast_suffices_in_light_and_dark_themes(
    page: Browser, made: str, theme: str
) -> None:
    for name in VIEWS:
        page.open(f"{made}#{name}", theme=theme)
        page.wait_for("controller 22ab0000")
        page.wait(lambda: page.ask("return document.querySelector('#view').innerText.length") > 60)
        seen = page.ask("""
            const ground = (one) => {
                for (; one; one = one.parentElement) {
                    const colour = getComputedStyle(one).backgroundColor;
                    if (colour !== 'rgba(0, 0, 0, 0)') return colour;
                }
                return getComputedStyle(document.documentElement).backgroundColor;
            };
            const texts = 'p, a, dt, dd, th, td span, li, h2, small, button';
            return [...document.querySelectorAll(texts)]
                .filter((one) => one.checkVisibility() && one.innerText.trim())
                .map((one) => [getComputedStyle(one).color, ground(one), one.innerText])
        """)
        weak = [one for one in seen if contrast(one[0], one[1]) < 4.5]
        assert weak == [], name
        assert len(seen) > 10
        shoot(page, f"{theme}-{name}")
    ground = page.ask("return getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(channels(ground)) < 0.3) == (theme == "dark")


def test_chosen_theme_is_kept(page: Browser, made: str) -> None:
    def ground() -> str:
        return str(page.ask("return getComputedStyle(document.documentElement).backgroundColor"))

    page.open(made, theme="light")
    light = ground()
    page.click("#theme")
    assert (page.text("#theme"), ground()) == ("Theme: light", light)
    page.click("#theme")
    dark = ground()
    assert page.text("#theme") == "Theme: dark" and dark != light
    page.open(f"{made}#events", theme="light")
    assert ground() == dark
    page.click("#theme")
    assert page.text("#theme") == "Theme: system" and ground() == light


def test_phone_shows_every_view_without_horizontal_scrolling(page: Browser, made: str) -> None:
    for name in VIEWS:
        page.open(f"{made}#{name}", width=360, height=740)
        page.wait_for("controller 22ab0000")
        page.wait(lambda: page.ask("return document.querySelector('#view').innerText.length") > 60)
        shoot(page, f"phone-{name}")
        wide = page.ask("return document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, name
        cut_off = page.ask("""
            return [...document.querySelectorAll('#view *')]
                .filter((one) => one.checkVisibility() && !one.closest('thead'))
                .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
                .map((one) => one.outerHTML)
        """)
        assert cut_off == [], name
        small = page.ask("""
            return [...document.querySelectorAll('button, select, nav a, input[type=search]')]
                .filter((one) => one.checkVisibility() && one.getBoundingClientRect().height < 36)
                .map((one) => one.outerHTML)
        """)
        assert small == [], "too small for a finger"


def test_text_from_peers_is_not_parsed_as_markup(page: Browser, made: str) -> None:
    page.open(f"{made}#workers")
    page.wait_for("<img src=x onerror=alert(1)>")
    assert page.ask("return document.querySelectorAll('#view img, #view script').length") == 0
    assert page.console_errors() == []


def test_lost_worker_and_lost_controller_are_shown(page: Browser, pool: PoolProcesses) -> None:
    controller = pool.start_controller("--dashboard", "0", "--dashboard-open")
    url = f"http://127.0.0.1:{port_of(controller)}/"
    supervisor, _ = pool.start_workers(2)
    pool.start_training()
    page.open(url)
    page.wait_for("2 serving, 0 free")
    page.wait(lambda: re.search(r"all: [1-9]", page.text()))
    page.click("nav a[href='#events']")
    pid = supervisor.served()[0][2]
    os.kill(pid, signal.SIGKILL)
    page.wait_for(f"/{pid} disappeared without draining; it worked for steady_training.py")
    assert "worker died" in page.text(".events [data-kind=worker_died]")
    assert f"/{pid} disappeared" in page.ask("return document.querySelector('#news').textContent")
    shoot(page, "lost-worker-events")
    page.click("nav a[href='#workers']")
    page.wait(lambda: f"/{pid}" not in page.text("tbody"))
    page.wait(lambda: page.text("tbody").count("serving") == 2)  # another was started
    page.click("nav a[href='#plan']")
    page.wait_for("calls run in the workers", "#view")
    page.wait_for("steady_training.py:", ".detail")
    shoot(page, "real-plan")
    page.click("nav a[href='#steps']")
    page.wait_for(" per step; ", "#view")
    assert re.search(r"compute \d+", page.text(".rank"))
    shoot(page, "real-steps")
    page.click("nav a[href='#overview']")
    assert page.console_errors() == []
    controller.process.kill()
    page.wait_for("the controller does not answer", "#trouble")
    assert "Training continues without it" in page.text("#trouble")
    assert page.ask("return document.querySelector('#trouble').getAttribute('role')") == "alert"
    assert "steady_training.py" in page.text("tbody")  # as it was
    shoot(page, "lost-controller")


def test_browser_needs_the_token_once(page: Browser, pool: PoolProcesses, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    options = ["--dashboard", "0", "--dashboard-token-file", str(token)]
    url = f"http://127.0.0.1:{port_of(pool.start_controller(*options))}/"
    page.open(url)
    assert "open it once with ?token=TOKEN" in page.text()
    page.open(f"{url}?token={TOKEN}")
    page.wait_for("controller ")
    page.wait_for("No job uses this pool now.")
    assert TOKEN not in page.driver.current_url
    assert page.ask("return document.cookie") == ""  # scripts cannot read it
    (cookie,) = page.driver.get_cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and TOKEN not in cookie["value"]
    page.open(f"{url}#workers")
    page.wait_for("The pool has no workers")
    page.console_errors()


class _Elsewhere(http.server.BaseHTTPRequestHandler):
    """A page that links to a dashboard and tries to read it."""

    dashboard = ""

    def do_GET(self) -> None:
        link, api = f"{self.dashboard}?token={TOKEN}", f"{self.dashboard}api/status"
        page = f"""<!doctype html><a href="{link}">the pool</a><script>
            fetch("{api}", {{credentials: "include"}}).then((answer) => answer.text())
                .then((text) => text, () => "refused")
                .then((told) => {{ document.title = told; }});
            </script>"""
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write no log."""


def test_other_sites_can_link_to_a_dashboard_but_not_read_it(page: Browser) -> None:
    with served(MadeWatch(), TOKEN) as dashboard:
        handler = type("Handler", (_Elsewhere,), {"dashboard": dashboard.url})
        site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        serving = threading.Thread(target=site.serve_forever)
        serving.start()
        try:
            for turn in ("without the cookie", "with it"):
                page.open(f"http://{EXTERNAL_HOST}:{site.server_port}/")
                page.wait(lambda: page.driver.title != "")
                assert page.driver.title == "refused", turn
                page.click("a")
                page.wait_for("controller 22ab0000")
                assert TOKEN not in page.driver.current_url
        finally:
            site.shutdown()
            serving.join()
            site.server_close()


def test_dns_rebinding_is_rejected(page: Browser, made: str) -> None:
    """DNS rebinding: to the browser the dashboard then belongs to the site's origin."""
    page.open(made.replace("127.0.0.1", EXTERNAL_HOST))
    page.wait_for("is not a name of this dashboard")
    page.open(made.replace("127.0.0.1", "localhost"))
    page.wait_for("controller 22ab0000")
    page.console_errors()
