# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning with asynchronous rollouts, which finish out of order.

Some rollouts take much longer than others, so training does not wait for the oldest. A checkpoint
holds the loader's state, which covers the prompts that were trained on: those whose rollouts were
still in progress are delivered again after a resume, the long ones too.

    python examples/async_rollouts.py --checkpoint job.pt --stop-after 20
    python examples/async_rollouts.py --checkpoint job.pt
"""

from __future__ import annotations

import argparse
import collections
import queue
import random
import threading
import time
from pathlib import Path

import torch

from penstock import DataLoader

PROMPTS, EPOCHS, ACTIONS = 400, 2, 8
IN_FLIGHT, PER_STEP = 32, 8  # rollouts at the same time, and in one step of the optimizer
GENERATORS = 16


class Prompts(torch.utils.data.Dataset):
    """Numbered prompts; the policy is to answer each with its number modulo ACTIONS."""

    def __len__(self):
        return PROMPTS

    def __getitem__(self, index):
        return torch.tensor(index)


def make_loader():
    return DataLoader(
        Prompts(),
        batch_size=1,
        shuffle=True,
        num_workers=2,
        seeding="batch",
        generator=torch.Generator().manual_seed(1),
        commit="manual",
    )


class Generators:
    """Threads that answer prompts, as inference servers do: with other delays, in another order."""

    def __init__(self, policy):
        self.policy = policy
        self.asked, self.answered = queue.SimpleQueue(), queue.SimpleQueue()
        for _ in range(GENERATORS):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            prompt = self.asked.get()
            tokens = random.paretovariate(1.2)  # most answers are short, a few very long
            time.sleep(min(0.001 * tokens, 0.5))
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=self.policy(prompt)).sample()
            self.answered.put((prompt, action, tokens))


def train(policy, optimizer, rollouts):
    prompts = torch.cat([prompt for prompt, _, _ in rollouts])
    actions = torch.cat([action for _, action, _ in rollouts])
    rewards = (actions == prompts % ACTIONS).float()
    chosen = torch.distributions.Categorical(logits=policy(prompts)).log_prob(actions)
    loss = -((rewards - 1 / ACTIONS) * chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(rewards.mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--stop-after", type=int, help="steps until the job stops")
    args = parser.parse_args()

    torch.manual_seed(0)
    policy = torch.nn.Embedding(PROMPTS, ACTIONS)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    loader = make_loader()
    epoch, step, lengths = 0, 0, collections.defaultdict(list)
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        policy.load_state_dict(saved["policy"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        epoch, step = saved["epoch"], saved["step"]
        lengths.update(saved["lengths"])
        print(f"resumed at step {step}")
    generators = Generators(policy)
    in_flight, finished, first_step = 0, [], step

    def save(epoch):
        saved = {
            "policy": policy.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
            "epoch": epoch,
            "step": step,
            "lengths": dict(lengths),
        }
        torch.save(saved, args.checkpoint)

    def collect(most_left):
        """Train on finished rollouts until at most so many are in flight."""
        nonlocal in_flight, step
        while in_flight > most_left:
            finished.append(generators.answered.get())
            in_flight -= 1
            if len(finished) < PER_STEP and in_flight > 0:
                continue
            reward = train(policy, optimizer, finished)
            step += 1
            for prompt, _, tokens in finished:
                loader.commit(prompt)  # in the order in which the rollouts ended
                lengths[int(prompt)].append(tokens)
            finished.clear()
            if step % 20 == 0:
                print(f"step {step}: reward {reward:.2f}, {len(loader.outstanding)} outstanding")

    def run(prompts, epoch):
        """Return False if the job stops."""
        nonlocal in_flight
        for prompt in prompts:
            generators.asked.put(prompt)
            in_flight += 1
            collect(IN_FLIGHT - 1)
            if args.stop_after is not None and step - first_step >= args.stop_after:
                save(epoch)
                print(f"stopped at step {step}: {len(loader.outstanding)} prompts are repeated")
                return False
        return True

    for number in range(epoch, EPOCHS):
        if not run(loader, number):
            return
    if not run(loader.redeliver(), EPOCHS):  # of a checkpoint that was saved after the last epoch
        return
    collect(0)
    save(EPOCHS)
    counts = collections.Counter(map(len, lengths.values()))
    assert counts == {EPOCHS: PROMPTS}, "a prompt was lost or trained on twice"
    longest = max(max(one) for one in lengths.values())
    print(f"{PROMPTS} prompts, each trained on {EPOCHS} times; longest answer {longest:.0f} tokens")


if __name__ == "__main__":
    main()
