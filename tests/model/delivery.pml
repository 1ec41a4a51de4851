/* SPDX-License-Identifier: Apache-2.0
 *
 * How batches get from workers to a trainer, whatever is lost: links, stamps, requests, credit, acknowledgements,
 * copies that are hedged, workers that crash, processes of jobs that die. README.md says what is proved of it and what
 * is left out.
 *
 * Every fault has a budget, and what a party repeats in vain until it helps (beginning a link, ping) is one step that
 * is taken when it helps. So a run cannot go round in circles, and a batch that is never delivered is a run that ends
 * early.
 */

#ifndef BATCHES
#define BATCHES 2   /* at most 4, for COUNT */
#endif
#ifndef CREDIT
#define CREDIT 1    /* batches that a worker may have outstanding with the trainer */
#endif
#ifndef CRASHES
#define CRASHES 1   /* a worker loses all that it knew; it comes back at once, or never */
#endif
#ifndef SILENCES
#define SILENCES 1  /* the trainer ends a link although its worker is well: it was stopped, cut off, or fenced */
#endif
#ifndef FORGETS
#define FORGETS 0   /* the same from a worker's side: it was cut off and forgets the trainer */
#endif
#ifndef LOSSES
#define LOSSES 0    /* a message disappears, as ZeroMQ's do when a connection is made again */
#endif
#ifndef DEATHS
#define DEATHS 0    /* the process in which a worker makes a batch dies over it, and the worker goes on with another */
#endif
#ifndef DEATHS_MAX
#define DEATHS_MAX 3  /* of a batch, which then fails: its error is delivered in its place */
#endif
#ifndef HEDGES
#define HEDGES 1    /* a batch is asked of a second worker although the first may answer yet */
#endif

#ifndef RECALLS
#define RECALLS 0   /* a batch that was delivered is asked for once more; with the batches at most 4 */
#endif

#ifndef LINKS
#define LINKS (1 + CRASHES + SILENCES + FORGETS + LOSSES + DEATHS)  /* a fault ends one link at most */
#endif
#define MAY_GO_UNHEARD unheard = unheard + (DEATHS > 0 -> 1 : 0)
#define DEPTH 10
#define BIT(batch) (1 << (batch))
#define HAS(set, batch) (((set) & BIT(batch)) != 0)
#define COUNT(set) (HAS(set, 0) + HAS(set, 1) + HAS(set, 2) + HAS(set, 3))
#define ALL ((BIT(BATCHES) - 1) | recalled)
#define OTHER(w) (1 - (w))

mtype = { hello, welcome, request, answer, ack, cancel, died };
mtype = { down, begun, up };

/* Kind, link, stamp, batch. */
chan to_worker[2] = [DEPTH] of { mtype, byte, byte, byte };
chan to_trainer[2] = [DEPTH] of { mtype, byte, byte, byte };

typedef TrainersEnd {
  mtype phase = down;
  byte link;    /* its number; they count up */
  byte sent;    /* the last stamp */
  byte seen;    /* the last stamp of the worker's */
  byte asked;   /* batches that are outstanding on this link */
  byte spent;   /* how many, for credit */
  byte coming;  /* 1 + the batch whose answer is on its way into the trainer's memory, or 0 */
};

typedef WorkersEnd {
  byte link;    /* 0: none */
  byte sent;
  byte seen;
  byte queued;  /* batches asked for and not made */
  byte held;    /* batches made and not acknowledged */
  bool gone;    /* for good */
};

TrainersEnd near[2];
WorkersEnd far[2];
byte entered;           /* batches that lie in the trainer's memory, or were delivered */
byte failed;            /* batches of which too many processes died */
byte deaths[4];         /* of each batch, as the trainer counts them */
byte processes_lost[4]; /* how many died over each */
byte unheard;           /* times that a death may have gone unheard: it was lost, or told on a link that had ended */
byte delivered;         /* how many the program was given */
byte recalled;          /* recalls, which are numbered behind the batches */
byte awaited;           /* 1 + the recall that the program stands still for, or 0 */
byte hedges = HEDGES;
byte silences = SILENCES;
byte dying = DEATHS;

/* When all that was sent has arrived or is lost, and both ends still disagree: what silence and pings, which carry the
 * last stamp that was sent, tell in the end. */
#define IS_BROKEN(w) (near[w].phase != down && empty(to_worker[w]) && empty(to_trainer[w]) && \
                      (far[w].link != near[w].link || far[w].seen != near[w].sent || near[w].seen != far[w].sent))

inline tell_worker(w, what, batch) {
  near[w].sent++;
  assert(nfull(to_worker[w]));
  to_worker[w]!what, near[w].link, near[w].sent, batch
}

inline tell_trainer(w, what, batch) {
  far[w].sent++;
  assert(nfull(to_trainer[w]));
  to_trainer[w]!what, far[w].link, far[w].sent, batch
}

/* What was outstanding there is asked for again, of whoever has credit. */
inline end_link(w) {
  near[w].phase = down;
#ifndef LOST_IS_NOT_ASKED_AGAIN
  near[w].asked = 0;
#endif
  near[w].spent = 0;
  near[w].coming = 0
}

/* The link has ended with the death that it tells of, so no message before it is missed. */
inline take_death(w, batch) {
  if
  :: HAS(near[w].asked, batch) && !HAS(entered, batch) ->
#if defined(DEATH_IS_NOT_COUNTED)
     skip
#elif defined(DEATH_COUNTS_FOR_ALL)
     count_death(0, HAS(near[w].asked, 0));
     count_death(1, HAS(near[w].asked, 1))
#else
     count_death(batch, true)
#endif
  :: else
  fi;
  end_link(w)
}

inline count_death(its, is_of_it) {
  deaths[its] = deaths[its] + (is_of_it -> 1 : 0);
  if
  :: deaths[its] == DEATHS_MAX ->
     assert(processes_lost[its] >= DEATHS_MAX);  /* no batch fails for the deaths of another */
     failed = failed | BIT(its)
  :: else
  fi
}

#ifdef DEATH_BEHIND_A_GAP_IS_LOST
#define IS_HEARD(kind, its, seen) ((kind) == died && !IS_GAP(its, seen))
#else
#define IS_HEARD(kind, its, seen) ((kind) == died)
#endif

#if defined(NO_DEDUPLICATION)
#define IS_WANTED(w, batch) true
#elif defined(HEDGE_IS_ACCEPTED_TWICE)
#define IS_WANTED(w, batch) HAS(near[w].asked, batch)
#else
#define IS_WANTED(w, batch) (!HAS(entered, batch))
#endif

/* The answer lies in memory. */
inline take_in(w, batch) {
  if
  :: IS_WANTED(w, batch) ->
     assert(!HAS(entered, batch));  /* each batch at most once */
     entered = entered | BIT(batch);
     near[w].asked = near[w].asked & ~BIT(batch);
     near[w].spent--;
     tell_worker(w, ack, batch);
#ifndef HEDGE_IS_ACCEPTED_TWICE
     if
     :: HAS(near[OTHER(w)].asked, batch) ->
        near[OTHER(w)].asked = near[OTHER(w)].asked & ~BIT(batch);
        near[OTHER(w)].spent--;
        tell_worker(OTHER(w), cancel, batch)
     :: else
     fi
#endif
  :: else  /* the other copy was here first, and this one crossed its cancellation */
#ifdef CREDIT_LEAK
     ; near[w].spent = (near[w].spent > 0 -> near[w].spent - 1 : 0)
#endif
  fi
}

#ifdef TRAINER_TAKES_ANY_LINK
#define IS_OF_AN_ENDED_LINK(w, its) false
#else
#define IS_OF_AN_ENDED_LINK(w, its) ((its) != near[w].link)
#endif

#ifdef WORKER_TAKES_ANY_LINK
#define IS_OF_ANOTHER_LINK(w, its) false
#else
#define IS_OF_ANOTHER_LINK(w, its) ((its) != far[w].link)
#endif

#ifdef NO_GAP_CHECK
#define IS_GAP(its, seen) false
#else
#define IS_GAP(its, seen) ((its) > (seen) + 1)
#endif

inline trainer_takes(w, kind, link, stamp, batch) {
  if
  :: near[w].phase == down || IS_OF_AN_ENDED_LINK(w, link) || stamp <= near[w].seen
  :: else ->
     if
     :: IS_HEARD(kind, stamp, near[w].seen) -> take_death(w, batch)
     :: !IS_HEARD(kind, stamp, near[w].seen) && IS_GAP(stamp, near[w].seen) ->
        unheard = unheard + (DEATHS > 0 && kind != died -> 1 : 0);
        end_link(w)
     :: else ->
        near[w].seen = stamp;
        if
        :: kind == welcome -> near[w].phase = up
        :: kind == answer ->
           near[w].coming = batch + 1;
#ifdef ACK_BEFORE_BUFFERED
           tell_worker(w, ack, batch)
#endif
        fi
     fi
  fi;
  kind = 0; link = 0; stamp = 0; batch = 0
}

#define NOT_ASKED (ALL & ~(entered | failed | near[0].asked | near[1].asked))
/* A batch over which a process has died may be hedged as well: the next one may hang. */
#define ONLY_ASKED_OF(w) (near[w].asked & ~near[OTHER(w)].asked)

/* A recall may go beyond the credit, by one: the program asks for nothing else before it has come. */
#define RECALL_TO_ASK (NOT_ASKED & recalled)

/* Asks worker w for the first batch of a set that is not empty. */
inline ask(w, set, batch) {
  batch = 0;
  do
  :: !HAS(set, batch) -> batch++
  :: else -> break
  od;
  near[w].asked = near[w].asked | BIT(batch);
  near[w].spent++;
  tell_worker(w, request, batch);
  batch = 0
}

/* The trainer's end of the link with worker w. */
proctype trainer(byte w) {
  mtype kind; byte link, stamp, batch;
end:
  do
  :: atomic { near[w].phase == down && !far[w].gone && (delivered < BATCHES || awaited > 0) ->
       assert(near[w].link < LINKS);
       near[w].link++;
       near[w].sent = 0;
       near[w].seen = 0;
       near[w].phase = begun;
       tell_worker(w, hello, 0) }
  /* Messages of one link arrive in order; those of ended links, which came by other connections, at any time. */
  :: atomic { near[w].coming == 0 && nempty(to_trainer[w]) ->
       to_trainer[w]?kind, link, stamp, batch;
       trainer_takes(w, kind, link, stamp, batch) }
  :: atomic { near[w].coming == 0 && to_trainer[w]??[_, eval(near[w].link), _, _] ->
       to_trainer[w]??kind, eval(near[w].link), stamp, batch;
       link = near[w].link;
       trainer_takes(w, kind, link, stamp, batch) }
  /* A death passes an answer that is still on its way into memory, which then never counts. */
  :: atomic { near[w].coming > 0 && to_trainer[w]??[died, eval(near[w].link), _, _] ->
       to_trainer[w]??died, eval(near[w].link), stamp, batch;
       kind = died;
       link = near[w].link;
       trainer_takes(w, kind, link, stamp, batch) }
  :: atomic { near[w].coming > 0 ->
       batch = near[w].coming - 1;
       near[w].coming = 0;
       take_in(w, batch);
       batch = 0 }
  /* Asks for the first batch that nobody was asked for, or for one that the other was asked for. */
  :: atomic { near[w].phase == up && near[w].spent < CREDIT && NOT_ASKED != 0 -> ask(w, NOT_ASKED, batch) }
  :: atomic { near[w].phase == up && near[w].spent == CREDIT && awaited > 0 && RECALL_TO_ASK != 0 ->
       ask(w, RECALL_TO_ASK, batch) }
  :: atomic { hedges > 0 && near[w].phase == up && near[w].spent < CREDIT && ONLY_ASKED_OF(OTHER(w)) != 0 ->
       hedges--;
       ask(w, ONLY_ASKED_OF(OTHER(w)), batch) }
  :: atomic { silences > 0 && near[w].phase != down -> silences--; MAY_GO_UNHEARD; end_link(w) }
  :: atomic { IS_BROKEN(w) -> MAY_GO_UNHEARD; end_link(w) }
  od
}

inline forget(w) {
  far[w].link = 0;
  far[w].sent = 0;
  far[w].seen = 0;
  far[w].queued = 0;
  far[w].held = 0
}

inline worker_takes(w, kind, link, stamp, batch) {
  if
  :: kind == hello && link > far[w].link ->
#ifndef OLD_WORK_IS_KEPT
     forget(w);
#endif
     far[w].link = link;
     far[w].seen = stamp;
     far[w].sent = 0;
     tell_trainer(w, welcome, 0)
  :: kind == hello && link <= far[w].link
  :: kind != hello && (far[w].link == 0 || IS_OF_ANOTHER_LINK(w, link) || stamp <= far[w].seen)
  :: else ->
     if
     :: IS_GAP(stamp, far[w].seen) -> forget(w)  /* and says so, which the trainer's ping would find out anyway */
     :: else ->
        far[w].seen = stamp;
        if
        :: kind == request ->
           far[w].queued = far[w].queued | BIT(batch);
           /* Credit is never exceeded, but by one recall at a time. */
           assert(COUNT(far[w].queued | far[w].held) <= CREDIT + RECALLS)
        :: kind == cancel ->
           far[w].queued = far[w].queued & ~BIT(batch);
           far[w].held = far[w].held & ~BIT(batch)
        :: kind == ack ->
           assert(HAS(entered, batch));  /* what is acknowledged is dropped here, so it must lie there */
           far[w].held = far[w].held & ~BIT(batch)
        fi
     fi
  fi;
  kind = 0; link = 0; stamp = 0; batch = 0
}

proctype worker(byte w) {
  mtype kind; byte link, stamp, batch;
end:
  do
  :: atomic { !far[w].gone && nempty(to_worker[w]) ->
       to_worker[w]?kind, link, stamp, batch;
       worker_takes(w, kind, link, stamp, batch) }
  :: atomic { !far[w].gone && to_worker[w]??[_, eval(far[w].link), _, _] ->
       to_worker[w]??kind, eval(far[w].link), stamp, batch;
       link = far[w].link;
       worker_takes(w, kind, link, stamp, batch) }
  :: atomic { !far[w].gone && to_worker[w]??[hello, _, _, _] ->
       to_worker[w]??hello, link, stamp, batch;
       kind = hello;
       worker_takes(w, kind, link, stamp, batch) }
  :: atomic { far[w].gone && nempty(to_worker[w]) -> to_worker[w]?_, _, _, _ }
  /* The process dies over the batch that it is at, and with it all that the worker has of the link. */
  :: atomic { dying > 0 && far[w].queued != 0 ->
       dying--;
       do
       :: !HAS(far[w].queued, batch) -> batch++
       :: else -> break
       od;
       processes_lost[batch]++;
       /* A batch is asked for no oftener, but for a copy that was hedged. */
       assert(processes_lost[batch] <= DEATHS_MAX + unheard + HEDGES - hedges);
       tell_trainer(w, died, batch);
       forget(w);
       batch = 0 }
  :: atomic { far[w].queued != 0 ->
       do
       :: !HAS(far[w].queued, batch) -> batch++
       :: else -> break
       od;
       far[w].queued = far[w].queued & ~BIT(batch);
       far[w].held = far[w].held | BIT(batch);
       tell_trainer(w, answer, batch);
       batch = 0 }
  od
}

/* The program. It has no end but the last batch: a run in which it waits for ever is an invalid end. */
proctype program() {
  byte recalls;
  do
  :: awaited == 0 && delivered == BATCHES -> break
  :: atomic { awaited == 0 && delivered > 0 && recalls < RECALLS ->
       awaited = BATCHES + recalls + 1;
       recalled = recalled | BIT(awaited - 1);
       recalls++ }
  :: atomic { awaited > 0 && HAS(entered | failed, awaited - 1) -> awaited = 0 }
#ifdef ORDER_OF_ARRIVAL
  :: atomic { awaited == 0 && delivered < BATCHES && COUNT(entered) > delivered ->
       assert(HAS(entered | failed, delivered));  /* in order */
#else
  :: atomic { awaited == 0 && HAS(entered | failed, delivered) && delivered < BATCHES ->
#endif
       delivered++ }
  od
}

inline drain(w) {
  do
  :: nempty(to_worker[w]) -> to_worker[w]?_, _, _, _
  :: empty(to_worker[w]) -> break
  od
}

inline crash(w) {
  forget(w);
  if
  :: drain(w)
  :: skip  /* what the system had taken for it reaches the next process */
  :: !far[OTHER(w)].gone -> far[w].gone = true; drain(w)
  fi
}

inline lose_to_trainer(w) {
  if
  :: to_trainer[w]?[died, _, _, _] -> unheard++
  :: else
  fi;
  to_trainer[w]?_, _, _, _
}

proctype faults() {
  byte crashes = CRASHES, forgets = FORGETS, losses = LOSSES;
end:
  do
  :: atomic { crashes > 0 && !far[0].gone -> crashes--; crash(0) }
  :: atomic { crashes > 0 && !far[1].gone -> crashes--; crash(1) }
  :: atomic { forgets > 0 && far[0].link != 0 -> forgets--; forget(0) }
  :: atomic { forgets > 0 && far[1].link != 0 -> forgets--; forget(1) }
  :: atomic { losses > 0 && nempty(to_worker[0]) -> losses--; to_worker[0]?_, _, _, _ }
  :: atomic { losses > 0 && nempty(to_worker[1]) -> losses--; to_worker[1]?_, _, _, _ }
  :: atomic { losses > 0 && nempty(to_trainer[0]) -> losses--; lose_to_trainer(0) }
  :: atomic { losses > 0 && nempty(to_trainer[1]) -> losses--; lose_to_trainer(1) }
  od
}

init {
  atomic {
    run trainer(0);
    run trainer(1);
    run worker(0);
    run worker(1);
    run program();
    run faults()
  }
}

ltl every_batch_is_delivered { <> (delivered == BATCHES) }
