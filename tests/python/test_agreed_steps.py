# SPDX-License-Identifier: Apache-2.0
"""The steps that ranks agree on, decided from their announcements alone."""

from __future__ import annotations

import random

from penstock.ranks.steps import AgreedSteps, Announcement, agree


def test_step_is_agreed_once_every_rank_announces_it() -> None:
    agreed = agree([Announcement(3), Announcement(1), Announcement(2)])
    assert [agreed.is_taken(step) for step in range(3)] == [True, None, None]


def test_agreement_ends_with_the_shortest_rank() -> None:
    agreed = agree([Announcement(2), Announcement(2, 2), Announcement(4, 5)])
    assert (agreed.end, agreed.ended_rank) == (2, 1)
    assert [agreed.is_taken(step) for step in (1, 2, 3)] == [True, False, False]


def test_departed_rank_is_named_and_its_steps_stay_agreed() -> None:
    agreed = agree([Announcement(3), Announcement(2, None, has_left=True)])
    assert agreed.left_rank == 1
    assert [agreed.is_taken(step) for step in (1, 2)] == [True, None]


def test_announcements_and_agreements_round_trip_as_text() -> None:
    for word in (Announcement(), Announcement(7, 9), Announcement(3, 0, True)):
        assert Announcement.from_text(word.to_text().encode()) == word
    for agreed in (AgreedSteps(), AgreedSteps(3, 4, 0, None), AgreedSteps(3, None, None, 2)):
        assert AgreedSteps.from_text(agreed.to_text().encode()) == agreed


def test_agreements_read_at_any_time_are_consistent() -> None:
    """Agreements made of words of any age never contradict one another."""
    rng = random.Random(5)
    for _ in range(300):
        totals = [rng.randrange(6) for _ in range(rng.randrange(1, 6))]
        end = min(totals)
        ready = [0] * len(totals)
        while True:
            words = [
                Announcement(count, total if count == total and rng.random() < 0.7 else None)
                for count, total in zip(ready, totals, strict=True)
            ]
            agreed = agree(words)
            for step in range(7):
                assert agreed.is_taken(step) in (None, step < end)
            behind = [rank for rank, total in enumerate(totals) if ready[rank] < total]
            if not behind:
                break
            ready[rng.choice(behind)] += 1
        whole = agree([Announcement(total, total) for total in totals])
        assert [whole.is_taken(step) for step in range(7)] == [step < end for step in range(7)]
