# SPDX-License-Identifier: Apache-2.0
"""The display of penstock top and the effect of its keys, on made-up pools and without a
terminal."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from rich.screen import Screen
from rich.segment import Segment
from shown_pools import FIRST, GROUP, SECOND, busy_pool, busy_status, ledger, status, trainer
from test_pool_status import worker

from penstock.live.pool_history import EventLog, EventView
from penstock.live.pool_view import pool_view
from penstock.live.top_screen import frame, frame_text, make_console
from penstock.live.top_state import TopState
from penstock.live.top_tables import JOBS

NOW = 1_800_000_003.0


class Top:
    """penstock top without a terminal."""

    def __init__(self, columns: int = 200, lines: int = 24, **others: Any) -> None:
        self.size = (columns, lines)
        self.console = make_console(width=columns, height=lines, force_terminal=True)
        self.state = TopState(busy_pool(), **others)

    def press(self, *keys: str) -> list[str]:
        return [self.state.press(key) for key in keys]

    def drawn(self) -> list[list[Segment]]:
        screen = Screen(frame(self.state, *self.size, NOW))
        return self.console.render_lines(screen, pad=False)

    def lines(self) -> list[str]:
        return ["".join(segment.text for segment in line).rstrip() for line in self.drawn()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines())

    def first_cells(self) -> list[str]:
        """Of the rows of the table."""
        lines = self.lines()
        head = next(n for n, line in enumerate(lines) if re.match("JOB|WORKER ", line))
        return [re.split(r"(?<=\w)  ", line)[0] for line in lines[head + 1 : -2] if line]

    def selected(self) -> str:
        style = self.console.get_style("selected")
        found = [
            "".join(part.text for part in line if part.style == style) for line in self.drawn()
        ]
        (text,) = filter(None, found)
        return text


def test_frame_summarises_pool_and_lists_jobs() -> None:
    top = Top()
    assert top.lines()[0] == "penstock top  controller 22ab0000 at tcp://10.0.0.1:5"
    assert "] 4: 2 serving, 1 free, 1 draining; demand not measured yet" in top.lines()[1]
    assert "26% of 3 trainers; 37.0 batches/s, 12.3 MB/s" in top.lines()[2]
    assert top.lines()[3].startswith("engine slurm: 4 running, 1 starting, 2 stopping, 6 wanted")
    assert re.search(
        r"^train.py: Images +gpu1/4 +11a10000 +2 +- +12.3 +12.3 MB/s +26%", top.text, re.M
    )
    assert re.search(r"^pretrain.py: Tokens, rank 1 +ann .* 2.0% .* the trainer$", top.text, re.M)


def test_tree_nests_ranks_and_workers_below_jobs() -> None:
    top = Top()
    top.press("f5")
    assert top.first_cells() == [
        "train.py: Images",
        "└─ worker node1/17",
        "pretrain.py: Tokens, 2 ranks",
        "├─ rank 0",
        "│  ├─ worker node2/17",
        "│  └─ worker node3/17",
        "└─ rank 1",
    ]
    top.press("down", "down", "+")
    assert top.first_cells()[2:] == ["+ pretrain.py: Tokens, 2 ranks"]
    top.press("t")
    assert len(top.first_cells()) == 3
    top.press("t", "*", "*")
    assert top.first_cells() == ["+ train.py: Images", "+ pretrain.py: Tokens, 2 ranks"]
    ascii_top = Top(in_ascii=True, is_tree=True)
    ascii_top.press("tab")
    assert ascii_top.first_cells()[:2] == ["node1", "`- node1/17"]


def test_filter_keeps_matching_rows_until_escape() -> None:
    top = Top()
    top.press("f4", *"RANK 1|images")
    assert "Filter: RANK 1|images_" in top.text
    assert top.first_cells() == ["train.py: Images", "pretrain.py: Tokens, rank 1"]
    top.press("backspace", "enter")
    assert "filter: RANK 1|image |" in top.text
    top.press("f4", "ctrl-u", *"nothing is called so")
    assert "Jobs: no row matches the filter" in top.text
    top.press("escape")
    assert len(top.first_cells()) == 3


def test_filter_in_tree_keeps_parent_rows() -> None:
    top = Top()
    top.press("t", "/", "escape", "f4", *"node3", "enter")
    assert [cell.lstrip("│├└─ ") for cell in top.first_cells()] == [
        "pretrain.py: Tokens, 2 ranks", "rank 0", "worker node3/17",
    ]  # fmt: skip


def test_search_selects_incrementally_and_f3_repeats() -> None:
    top = Top()
    assert top.selected().startswith("train.py: Images")
    top.press("f3", *"tok")
    assert "Search: tok_" in top.text and "rank 0" in top.selected()
    top.press("f3")
    assert "rank 1" in top.selected()
    top.press("f3")
    assert "rank 0" in top.selected()
    top.press("enter", "n")
    assert "rank 1" in top.selected()
    top.press("/", *"images", "escape")
    assert top.selected().startswith("train.py: Images")


def test_rows_sort_by_chosen_column_and_reverse() -> None:
    top = Top()
    top.press("f6")
    assert "Sort by" in top.text and "order of the controller" in top.text
    waits = [column.title for column in JOBS.columns].index("WAITS") + 1
    top.press(*["down"] * waits, "enter")
    assert "WAITSv" in top.text
    waiting = [re.search(r"([\d.]+)%", line) for line in top.lines()[6:9]]
    assert [match and match[1] for match in waiting] == ["50", "26", "2.0"]
    top.press("I")
    assert "WAITS^" in top.text and "rank 1" in top.first_cells()[0]
    top.press("f6", "home", "enter")
    assert top.first_cells()[0] == "train.py: Images"


def test_cursor_follows_its_row_in_follow_mode() -> None:
    top = Top()
    top.press("F", "down", "f6", "down", "enter")  # sorted by job
    assert "rank 0" in top.selected() and "following" in top.text
    other = busy_status()
    other["trainers"].reverse()
    top.press("f6", "home", "enter")
    top.state.update(pool_view(other, NOW), ())
    assert "rank 0" in top.selected()
    top.press("F")
    other["trainers"].insert(0, other["trainers"].pop())
    top.state.update(pool_view(other, NOW), ())
    assert top.selected().startswith("train.py")


def test_tagged_jobs_are_totalled() -> None:
    top = Top()
    top.press(" ", " ")
    assert "2 tagged: 24.7 batches/s" in top.text
    assert "rank 1" in top.selected()
    top.press("U")
    assert "tagged" not in top.text


def test_jobs_can_be_filtered_by_user() -> None:
    top = Top()
    top.press("t", "u")
    assert "all users" in top.text
    top.press("down", "enter")
    assert top.first_cells()[0] == "train.py: Images"  # a job without a user
    assert "user: ann" in top.text
    top.press("u", "up", "enter")
    assert "user:" not in top.text


def test_help_lists_every_column_and_closes_on_any_key() -> None:
    top = Top(120, 60)
    top.press("f1")
    for column in JOBS.columns:
        assert re.search(
            f"^ +{re.escape(column.title)}  {re.escape(column.meaning)}$", top.text, re.M
        )
    assert top.press("q") == [""]
    assert top.press("q") == ["quit"]
    assert top.press("f10", "r", "ctrl-l") == ["quit", "refresh", "redraw"]


def test_pause_freezes_the_display() -> None:
    top = Top()
    top.press("Z")
    top.state.update(pool_view(status([], []), NOW), ())
    assert "paused 3 s ago" in top.text and len(top.first_cells()) == 3
    top.press("Z")
    top.state.update(pool_view(status([], []), NOW), ())
    assert "Jobs: none" in top.text


def test_display_is_marked_stale_without_controller() -> None:
    top = Top()
    top.state.trouble = "no controller answered at tcp://10.0.0.1:5"
    assert "last update 3 s ago: no controller answered at tcp://10.0.0.1:5" in top.text


def test_stage_shares_cover_the_last_interval() -> None:
    top = Top()
    top.press("back tab", "back tab")
    (line,) = [line for line in top.lines() if line.startswith("train.py")]
    assert line.split()[3:8] == ["40.00", "25.0%", "75.0%", "12.5%", "0.0%"]
    later = busy_status()
    later["trainers"][0]["ledger"] = ledger(200, compute=4.0, dataset=3.4, wire=0.5, loader=0.1)
    top.state.update(pool_view(later, NOW), ())
    (line,) = [line for line in top.lines() if line.startswith("train.py")]
    assert line.split()[3:8] == ["40.00", "72.5%", "25.0%", "72.5%", "0.0%"]


def test_trainer_without_step_times_shows_work_and_waiting() -> None:
    measured = trainer(1, step_s=0.03, starved_s=0.01, limited_by="workers")
    text = frame_text(pool_view(status([], [measured]), NOW), is_tree=False)
    assert re.search(r"11a10000 +40.00 +25.0% +75.0% +- +-", text)
    unmeasured = frame_text(pool_view(status([], [trainer(1)]), NOW), is_tree=False)
    assert re.search(r"Stages:\n.*\n.*11a10000 +- +-", unmeasured)


def test_job_without_workers_shows_the_reason() -> None:
    top = Top()
    view = pool_view(status([], [trainer(1, workers=0, reason="nobody is free")]), NOW)
    top.state.update(view, ())
    assert "no workers; nobody is free" in top.text
    top.state.update(pool_view(status([], [trainer(1, workers_max=0, idle_s=7.0)]), NOW), ())
    assert "idle for 7 s, as between epochs" in top.text and " idle " in top.text


@pytest.mark.slow
def test_frame_fits_every_terminal_size() -> None:
    """In every mode, at any size: the screen is filled, and the selected row is on it."""
    modes: list[list[str]] = [
        [], ["f1"], ["f3", "a"], ["f4", "zzz"], ["f6"], ["t"], ["tab"], ["tab"] * 2, ["tab"] * 3,
        ["right"] * 9, ["end"],
    ]  # fmt: skip
    for columns in (1, 2, 3, 7, 33, 80):
        for lines in (1, 2, 3, 4, 5, 7, 8, 24):
            for mode in modes:
                top = Top(columns, lines)
                top.press(*mode)
                drawn = top.drawn()
                assert len(drawn) == lines
                widths = {sum(segment.cell_length for segment in line) for line in drawn}
                assert widths == {columns}, (mode, top.size)
                if mode in ([], ["t"], ["tab"], ["end"]):
                    assert top.selected().strip(), (mode, top.size)


def test_left_and_right_show_other_columns() -> None:
    top = Top(60)
    assert "LIMITED BY" not in top.text and "JOB " in top.text
    top.press(*["right"] * 12)
    assert "LIMITED BY" in top.text and "the trainer" in top.text and "JOB " not in top.text
    top.press(*["right"] * 99, *["left"] * 111)
    assert "JOB " in top.text


def test_long_table_scrolls_with_the_cursor() -> None:
    top = Top(80, 12)
    workers = [worker(n, id=f"{n:016x}", about=f"node{n}, process 1") for n in range(100)]
    top.state.update(pool_view(status(workers, []), NOW), ())
    top.press("tab", "page down", "page down", "down")
    assert top.selected().split()[0] in [cell.strip() for cell in top.first_cells()]
    top.press("end")
    assert top.selected().startswith("node99/1") and "node99/1" in top.text
    assert len(top.first_cells()) == len(top.lines()) - 7
    top.press("home")
    assert top.selected().startswith("node0/1")


def test_wide_characters_keep_columns_aligned() -> None:
    jobs = [trainer(n, job=name) for n, name in enumerate(("Bücher", "写真", "e\u0301t"))]
    for one in jobs:  # the controller escapes each byte of a name
        one["job"] = one["job"].encode().decode("latin-1")
    top = Top()
    top.state.update(pool_view(status([], jobs), NOW), ())
    lines = [line for line in top.drawn() if "gpu" in "".join(part.text for part in line)]
    before = ["".join(part.text for part in line).split("gpu")[0] for line in lines]
    assert len(before) == 3 and len({Segment(text).cell_length for text in before}) == 1


def test_names_are_shown_as_they_are() -> None:
    """Not as markup, links or emoji, and without characters that control the terminal."""
    name = "[bold]a[/] :smile: https://x \x1b[2J\n\x9b"
    view = pool_view(status([worker(1, endpoint=name)], [trainer(1, job=name)]), NOW)
    top = Top()
    top.state.update(view, ())
    for text in (top.text, frame_text(view, is_tree=True)):
        assert "[bold]a[/] :smile: https://x \\x1b[2J\\n" in text
    top.press("tab")
    assert "[bold]a[/] :smile: https://x \\x1b[2J\\n" in top.text
    shown = top.text + frame_text(view, is_tree=True)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)


def test_json_has_jobs_with_ranks_and_totals() -> None:
    fields: dict[str, Any] = json.loads(json.dumps(busy_pool().as_json()))
    assert [job["id"] for job in fields["jobs"]] == [FIRST, GROUP]
    assert fields["jobs"][1]["ranks"] == [SECOND, "11a3000000000001"]
    assert fields["jobs"][1]["waited_share_max"] == 0.5
    assert fields["totals"]["workers_by_state"] == {
        "serving": 2, "free": 1, "moving": 0, "stuck": 0, "draining": 1,
    }  # fmt: skip
    assert fields["trainers"][0]["ledger"]["seconds"]["compute"] == 3.0
    assert fields["trainers"][0]["bytes_per_s"] == pytest.approx(12.34e6)


def kinds_of(*statuses: dict[str, Any]) -> list[tuple[str, str]]:
    log = EventLog()
    for number, fields in enumerate(statuses):
        log.add(pool_view(fields, NOW + number))
    return [(event.kind, event.text) for event in log.events()]


def test_events_are_derived_from_status_changes() -> None:
    one, two = worker(1), worker(2, trainer=FIRST)
    job = trainer(1)
    assert kinds_of(
        status([one], []),
        status([one, two], [job]),
        status([{**one, "is_draining": True}, two], [job]),
        status([two], [job]),
        status([], [job]),
        status([], []),
    ) == [
        ("worker_joined", "worker node2/17 joined"),
        ("trainer_joined", "train.py: Images of gpu1/4 joined"),
        ("assigned", "worker node2/17 works for train.py: Images of gpu1/4"),
        ("worker_left", "worker node1/17 left"),
        (
            "worker_died",
            "worker node2/17 disappeared without draining; "
            "it worked for train.py: Images of gpu1/4",
        ),
        ("trainer_left", "train.py: Images of gpu1/4 left"),
    ]
    hedges = [status([], [trainer(1, hedged_batches=count)]) for count in (5, 5, 6, 8)]
    assert kinds_of(*hedges) == [
        (
            "hedged",
            "1 late batch of train.py: Images of gpu1/4 also requested from a second worker",
        ),
        (
            "hedged",
            "2 late batches of train.py: Images of gpu1/4 also requested from a second worker",
        ),
    ]
    wanted = {**busy_status()["engine"], "wanted": 8}
    assert kinds_of(busy_status(), {**busy_status(), "engine": wanted}) == [
        ("scaled", "engine slurm: 8 workers wanted, 6 before; the jobs can use 6")
    ]


def test_only_plan_changes_are_events() -> None:
    plans = [status([], [trainer(1, plan_changes=count)]) for count in (3, 3, 4, 6)]
    moved = "train.py: Images of gpu1/4 now moves other calls to the workers"
    assert kinds_of(status([], []), *plans) == [
        ("trainer_joined", "train.py: Images of gpu1/4 joined"),
        ("replanned", moved),
        ("replanned", moved),
    ]
    of_ranks = [
        status([], [trainer(1, plan_changes=one), trainer(2, plan_changes=two)])
        for one, two in ((0, 0), (0, 1))
    ]
    assert [text for _, text in kinds_of(*of_ranks)] == [moved.replace("gpu1", "gpu2")]


def test_event_log_restarts_with_another_controller() -> None:
    log = EventLog()
    for number, there in enumerate(([], [worker(1)], [worker(1), worker(2)])):
        log.add(pool_view(status(there, []), NOW + number))
    text = "worker node1/17 joined"
    assert log.events()[0] == EventView(1, NOW + 1, "worker_joined", text, None, worker(1)["id"])
    assert [event.sequence for event in log.events()] == [1, 2]
    assert log.counts == {"worker_joined": 2}
    other = status([], [])
    other["controller"]["id"] = "33cd000000000001"
    log.add(pool_view(other, NOW + 3))
    assert log.events() == () and log.counts == {"worker_joined": 2}
    other = {**other, "workers": [worker(3)]}
    log.add(pool_view(other, NOW + 4))
    assert [event.sequence for event in log.events()] == [1]
