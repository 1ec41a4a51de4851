# SPDX-License-Identifier: Apache-2.0
"""Jobs of a pool as a whole: the verdict over their ranks, and those that have ended."""

from __future__ import annotations

from typing import Any

from shown_pools import FIRST, GROUP, SECOND, busy_status, status, trainer

from penstock.live.pool_history import ENDED_MAX, EndedJobs
from penstock.live.pool_view import JobGroup, Verdict, pool_view


def rank(number: int, **others: Any) -> dict[str, Any]:
    fields = {"job": "train.py: Images", "workers": 2, "workers_max": 8, "workers_wanted": 2}
    return trainer(number, **{**fields, **others})


def job(*ranks: dict[str, Any]) -> JobGroup:
    groups = pool_view(status([], list(ranks)), 0.0).job_groups()
    assert len(groups) == 1
    return groups[0]


def ranks_of_one_job(*others: dict[str, Any]) -> JobGroup:
    world = {"group": GROUP, "world_size": len(others)}
    return job(*(rank(n, **{**world, "rank": n, **one}) for n, one in enumerate(others)))


def test_verdict_on_a_job_of_one_rank() -> None:
    measured = {"limited_by": "workers", "waited_share": 0.04}
    assert job(rank(1, **measured)).verdict() == Verdict("good", "it waits 4% of the time")
    waiting = {**measured, "waited_share": 0.5, "workers_wanted": 5}
    assert job(rank(1, **waiting)).verdict() == Verdict(
        "bad",
        "it waits 50% of the time, limited by the workers' CPUs; 3 more workers would help",
    )
    linked = {"limited_by": "link", "waited_share": 0.2}
    text = "it waits 20% of the time, limited by the link"
    assert job(rank(1, **linked)).verdict() == Verdict("warn", text)
    assert job(rank(1, limited_by="unknown", waited_share=None)).verdict() == Verdict(
        "", "not measured yet"
    )
    idle = job(rank(1, workers_max=0, idle_s=7.4)).verdict()
    assert idle == Verdict("", "idle for 7 s, as between epochs")
    without = job(rank(1, workers=0, reason="no worker is free"))
    assert without.verdict() == Verdict("bad", "it has no workers: no worker is free")


def test_verdict_names_the_rank_for_which_the_others_wait() -> None:
    fed = {"limited_by": "trainer", "waited_share": 0.03}
    slow = {"limited_by": "workers", "waited_share": 0.31, "workers_wanted": 3}
    assert ranks_of_one_job(fed, slow, fed).verdict() == Verdict(
        "bad",
        "rank 1 waits 31% of the time, limited by the workers' CPUs; another rank waits only 3%; "
        "1 more worker would help",
    )
    even = ranks_of_one_job(fed, {**fed, "waited_share": 0.05})
    assert even.verdict() == Verdict("good", "no rank waits more than 5% of the time")


def test_jobs_of_a_status_have_their_verdict_and_their_ranks() -> None:
    jobs = pool_view(busy_status(), 0.0).as_json()["jobs"]
    assert [one["ranks"] for one in jobs][0] == [FIRST]
    assert all(one["verdict"] and one["tone"] in ("good", "warn", "bad", "") for one in jobs)


def test_job_whose_ranks_have_all_left_is_kept() -> None:
    ended = EndedJobs()
    two = busy_status()
    both = [one for one in two["trainers"] if one["group"] == GROUP]
    ended.add(pool_view(two, 100.0))
    two["trainers"].remove(both[0])
    ended.add(pool_view(two, 160.0))
    assert ended.jobs() == ()
    verdict = pool_view(two, 0.0).job_groups()[-1].verdict().text
    two["trainers"].remove(both[1])
    ended.add(pool_view(two, 220.0))
    (gone,) = ended.jobs()
    assert (gone.id, gone.user, gone.ended_at, gone.seen_s) == (GROUP, "ann", 220.0, 120.0)
    assert gone.delivered_batches == both[1]["queue"]["delivered_batches"]
    assert gone.verdict == verdict
    assert SECOND in gone.ranks or both[1]["id"] in gone.ranks


def test_job_that_returns_has_not_ended() -> None:
    ended = EndedJobs()
    for trainers, count in (([rank(1)], 0), ([], 1), ([rank(1)], 0)):
        ended.add(pool_view(status([], trainers), 0.0))
        assert len(ended.jobs()) == count


def test_ended_jobs_are_bounded_and_forgotten_with_the_controller() -> None:
    ended = EndedJobs()
    for number in range(ENDED_MAX + 5):
        ended.add(pool_view(status([], [rank(number)]), float(number)))
    assert [one.ended_at for one in ended.jobs()] == [*map(float, range(5, ENDED_MAX + 5))]
    other = status([], [])
    other["controller"] = {**other["controller"], "id": "beef000000000001"}
    ended.add(pool_view(other, 0.0))
    assert ended.jobs() == ()
