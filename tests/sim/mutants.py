# SPDX-License-Identifier: Apache-2.0
"""Bugs that the protocol could have, each of one or a few lines, grouped by their effect."""

from __future__ import annotations

from simulation import Mutation

MUTANTS: dict[str, tuple[Mutation, ...]] = {
    "what a lost worker owed is not asked for again": (
        Mutation(
            "dispatch.cpp",
            """    ++reissue_count_;
    waiting_.insert(key);
  }
  place(now);
}

void Dispatch::forgive""",
            """  }
  place(now);
}

void Dispatch::forgive""",
        ),
    ),
    "what a drained worker gives back is not asked for again": (
        Mutation(
            "dispatch.cpp",
            """  if (request.workers.empty()) {
    ++reissue_count_;
    waiting_.insert(key);
  }""",
            "",
        ),
    ),
    "the second copy of a hedged request is not taken back": (
        Mutation(
            "dispatch.cpp",
            """.has_come = answerer.has_value()});
    take_from(slot, key);
    report_if_idle(slot);
""",
            """.has_come = answerer.has_value()});
""",
        ),
    ),
    "credit is not looked at": (
        Mutation(
            "dispatch.cpp",
            "  return worker.outstanding.size() + 1 <= worker.credit_bytes / largest_bytes_;",
            "  return true;",
        ),
    ),
    "deaths are not counted": (
        Mutation("dispatch.cpp", "++request.death_count >=", "request.death_count >="),
    ),
    "silence counts as a death of what was begun": (
        Mutation("dispatch.cpp", "loss == Loss::kDied && is_blamed", "is_blamed"),
    ),
    "a lane goes on elsewhere without its state": (
        Mutation("dispatch.cpp", "is_lane_start = is_new;", "static_cast<void>(is_new);"),
    ),
    "batches of a lane overtake each other": (
        Mutation("dispatch.cpp", "      blocked.insert(lane);\n", ""),
    ),
    "messages of ended links count": (
        Mutation("worker_session.h", "number != number_ || stamp", "stamp"),
        Mutation(
            "pool_session.cpp",
            "link == peer.link.number() && peer.state",
            "peer.state",
        ),
    ),
    "a gap on a link is not seen": (
        Mutation("worker_session.h", "    if (stamp != received_ + 1) return Receipt::kGap;\n", ""),
        Mutation(
            "worker_session.h",
            "    received_ = stamp;",
            "    received_ = stamp > received_ ? stamp : received_;",
        ),
    ),
    "what was outstanding is not said on the next link": (
        Mutation(
            "pool_session.cpp",
            "  for (const wire::BatchKey key : repeated) send_request(worker_id, peer, key);\n",
            "",
        ),
        Mutation("pool_session.cpp", "static_cast<uint32_t>(repeated.size())", "0u"),
    ),
    "a worker that knows nothing is taken for one that does": (
        Mutation("pool_session.cpp", "if (peer.slot && is_fresh) {", "if (false && is_fresh) {"),
    ),
    "a trainer that knows nothing is taken for one that does": (
        Mutation("worker_session.cpp", " || !hello.is_continued;", ";"),
    ),
    "an answer is forgotten once it is sent": (
        Mutation("worker_session.cpp", "  held_.emplace(done.key, true);\n", ""),
    ),
    "what the trainer has is held for ever": (
        Mutation("worker_session.cpp", "    if (!is_claimed) unclaimed.push_back(key);", ""),
    ),
    "what is finished while the trainer repeats itself is dropped": (
        Mutation(
            "worker_session.cpp",
            "if (!done.is_wanted && may_be_claimed) {",
            "if (false && may_be_claimed) {",
        ),
    ),
    "another trainer's batch of the same number is taken for this one's": (
        Mutation("worker_session.cpp", "running_->trainer_id == request.trainer_id && ", ""),
    ),
    "a silent trainer is never forgotten": (
        Mutation(
            "worker_session.cpp",
            "if (tenant_ && now - tenant_->heard_at >= kLease) abandon();",
            "static_cast<void>(now);",
        ),
    ),
    "a worker whose process has ended goes on as if it had its lanes": (
        Mutation(
            "worker_session.cpp",
            """  running_.reset();
  abandon();
}

void WorkerSession::decline""",
            """  running_.reset();
}

void WorkerSession::decline""",
        ),
    ),
    "deaths of workers' processes are not counted": (
        Mutation(
            "pool_session.cpp",
            "      lose(peer, Loss::kDied, now + kDiedPause, now);\n      break;",
            "      lose(peer, Loss::kSilent, now + kDiedPause, now);\n      break;",
        ),
    ),
    "a welcome takes back the death that the worker has told": (
        Mutation(
            "pool_session.cpp",
            "      if (peer.slot) dispatch_.started(*peer.slot, message.key);\n      lose(",
            "      if (peer.slot) dispatch_.started(*peer.slot, message.key);\n"
            "      peer.blamed = message.key;\n      lose(",
        ),
    ),
    "a worker serves whoever greets it": (
        Mutation(
            "worker_session.cpp",
            "(is_draining_ || tenant_ || !is_assigned)",
            "(is_draining_ || tenant_)",
        ),
    ),
    "only the first orders of a controller count": (
        Mutation("enrolment.h", "orders.view < view_;", "true;"),
    ),
    "a roster counts its views anew for a trainer that comes back": (
        Mutation("roster.cpp", "found->second.view = ++view_count_;", "++found->second.view;"),
        Mutation("roster.cpp", "    trainer.view = ++view_count_;", "    trainer.view = 1;"),
    ),
    "a worker stays with a trainer that it has declined": (
        Mutation(
            "roster.cpp",
            "worker.is_withdrawn || !is_fit(worker, worker.trainer_id)",
            "worker.is_withdrawn",
        ),
        Mutation(
            "share_out.cpp",
            "if (works_for(hand, trainer) && is_fit(hands_[hand], demands_[trainer]))",
            "if (works_for(hand, trainer))",
        ),
    ),
    "a worker is given to a trainer that it has declined": (
        Mutation(
            "share_out.cpp",
            "if (owners_[hand] != kNobody || !is_fit(hands_[hand], demands_[trainer])) continue;",
            "if (owners_[hand] != kNobody) continue;",
        ),
    ),
    "a worker that its trainer could do without is not given up for another": (
        Mutation("share_out.cpp", "        to_visit.push_back(other);\n", ""),
    ),
    "workers that are withdrawn are never released": (
        Mutation(
            "pool_session.cpp",
            "    if (peer.slot) {\n      dispatch_.drain_worker(*peer.slot, now);\n    } else {",
            "    if (!peer.slot) {",
        ),
    ),
    "a batch that hangs among the first is not hedged": (
        Mutation(
            "dispatch.cpp",
            "return LateAfter{.usual = far_beyond, .deadly = far_beyond};",
            "return std::nullopt;",
        ),
    ),
    "a batch over which a worker has died is not hedged": (
        Mutation(
            "dispatch.cpp",
            "  return request.lane == wire::kNoLane && request.workers.size() == 1;",
            "  return request.lane == wire::kNoLane && request.death_count == 0 && "
            "request.workers.size() == 1;",
        ),
    ),
    "a batch that is to run alone waits for a worker that hangs": (
        Mutation("dispatch.cpp", "  if (is_alone && idle_worker()) unreserve(key);\n", ""),
    ),
    "what is being made is not taken back": (
        Mutation(
            "worker_session.cpp",
            "  if (running_ && running_->key == key) running_->is_wanted = false;\n",
            "",
        ),
    ),
    "a process that hangs in what nobody wants is never ended": (
        Mutation(
            "maker.h",
            "    return abandoned_ >= (longest_ ? std::max(grace.later, 2 * *longest_) : "
            "grace.first_batch);",
            "    return grace.later < Duration(0);",
        ),
    ),
    "a worker that hangs in what nobody wants is not shown as stuck": (
        Mutation(
            "maker.h",
            "return abandoned_ >= std::max(kStuckAfter, longest());",
            "return false;",
        ),
    ),
    "a worker that is stuck is given to trainers": (
        Mutation(
            "roster.h", "return !is_leaving() && !report.is_stuck();", "return !is_leaving();"
        ),
    ),
    "a worker that hangs never leaves": (
        Mutation(
            "maker.h",
            "  return drained_at && now - *drained_at >= grace;",
            "  return drained_at && now - *drained_at < Duration(0) && grace < Duration(0);",
        ),
    ),
}
