"""Coconut: step by step of the chain gives way to latents, each the hidden state of the one before it.

Coconut arXiv:2412.06769; its equation is `core.rollout.sequential` with no map between.

Symbols: k steps removed, n latents, c latents for a step.
"""

from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor, nn

from laconic.core.answering import Writing, after, quiet
from laconic.core.cache import Cache
from laconic.core.contract import Answers, Reasoning, Step
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.generate import Passes
from laconic.core.keyed import uniform
from laconic.core.rollout import Edit, Rollout, sequential
from laconic.core.thoughts import Thoughts
from laconic.methods.cot import begun, ends, nll, only, refuse, scored, shortened, teacher_targets
from laconic.methods.settings import Staging


class Coconut(nn.Module):
    """Coconut whole: question, bot, latents, eot, the steps that are left, answer; all after eot scored."""

    def __init__(
        self,
        decoder: Decoder,
        thoughts: Thoughts,
        how: Staging,
        *,
        steps_per_epoch: int,
        seed: int = 0,
    ) -> None:
        super().__init__()
        most = how.max_stage * how.per_step
        if (thoughts.mode, thoughts.map, thoughts.count) != ("sequential", None, max(1, most)):
            raise Usage(
                f"coconut: {thoughts.count} {thoughts.mode} thoughts; choose {most} sequential ones, project none"
            )
        self.decoder, self.thoughts, self.how = decoder, thoughts, how
        self.steps_per_epoch, self.seed = steps_per_epoch, seed
        self.stage: int | None = None  # whose latents an answer takes; none: the last stage

    def scheduled(self, epoch: int) -> int:
        """The stage of an epoch, before any draw."""
        return self.how.first_stage + epoch // self.how.epochs_per_stage

    def staged(self, batch: Reasoning) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
        """k and n of each row; outside training no stage is drawn."""
        how, device = self.how, batch.chain.device
        steps = torch.zeros(batch.B, dtype=torch.long, device=device)
        if batch.chain.shape[1]:
            steps = (batch.chain_step + 1).masked_fill(~batch.chain_live, 0).amax(1)
        stage = torch.full_like(steps, self.scheduled(batch.epoch))
        if self.training and how.uniform_prob:
            u = uniform(self.seed, batch.epoch, batch.index.cpu().numpy()[:, None], torch.arange(2).numpy()[None])
            which, where = torch.as_tensor(u).to(device).unbind(1)
            stage = torch.where(which < how.uniform_prob, (where * (steps + 1)).long(), stage)
        last = torch.full_like(steps, how.max_stage)
        most = last if how.pad_latent_to_max else torch.minimum(steps, last)
        over = stage > how.max_stage
        return torch.where(over, steps, stage), torch.where(over, most, stage) * how.per_step

    def left(self, batch: Reasoning, k: Int[Tensor, " B"]) -> Reasoning:
        """The batch without the first k steps of each chain."""
        return shortened(batch, batch.chain_step >= k[:, None])

    def totals(self, batch: Reasoning) -> dict[str, float]:
        """Tokens, or rows, that are scored."""
        return {"student": scored(teacher_targets(self.left(batch, self.staged(batch)[0])), self.how.ce_reduction)}

    def forward(self, batch: Reasoning, state: Cache | None = None) -> Step:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        k, n = self.staged(batch)
        left, most = self.left(batch, k), int(n.max())
        rolled = self.rolled(batch, most, state)
        thought = torch.arange(most, device=n.device) < n[:, None]
        before = rolled.state.live[:, : rolled.state.S - most]
        held = rolled.state.with_live(torch.cat([before, thought], 1))
        words = self.decoder.embed(torch.cat([left.chain, left.answer], 1))
        eot = self.thoughts.eot.to(words.dtype).expand(batch.B, 1, -1)
        live = torch.cat([torch.ones_like(k, dtype=torch.bool)[:, None], left.chain_live, left.answer_live], 1)
        hidden = self.decoder(torch.cat([eot, words], 1), held, live=live).hidden
        targets = teacher_targets(left)
        total = scored(targets, self.how.ce_reduction) if batch.totals is None else batch.totals["student"]
        logits = partial(self.thoughts.logits, self.decoder)
        return only("student", nll(logits, hidden, targets, self.how.ce_reduction, total))

    def rolled(
        self, batch: Reasoning, n: int, state: Cache | None = None, edit: Edit | None = None, trace: bool = False
    ) -> Rollout:
        """Question and bot read in one pass, then n latents."""
        words = self.decoder.embed(batch.question)
        bot = self.thoughts.bot.to(words.dtype).expand(batch.B, 1, -1)
        live = torch.cat([batch.question_live, batch.question_live.new_ones(batch.B, 1)], 1)
        prefix = torch.cat([words, bot], 1)
        return sequential(self.decoder, prefix, n, self.thoughts.project, state, live, edit, trace)

    def restarts(self, batch: Reasoning) -> bool:
        """At the first step of every epoch but the first."""
        return batch.step > 0 and batch.step % self.steps_per_epoch == 0

    def think(self, questions: Reasoning, edit: Edit | None = None, trace: bool = False) -> Rollout:
        """The latents on questions: as many as `stage` has. Raises `Usage` (2)."""
        if not self.how.pad_latent_to_max:
            raise Usage("pad_latent_to_max false: the number of latents would be read off the chain that is asked for")
        stage = self.how.max_stage if self.stage is None else min(self.stage, self.how.max_stage)
        with quiet(self):
            return self.rolled(questions, stage * self.how.per_step, None, edit, trace)

    def answer(self, questions: Reasoning, writing: Writing, *, teacher: bool = False) -> Answers:
        """What follows latents and eot: the steps that are left, prompt, answer. Raises `Usage` (2) for a teacher."""
        refuse(teacher, "Coconut")
        rolled = self.think(questions)
        return self.follow(questions, rolled.state, rolled.passes, writing)

    def follow(self, questions: Reasoning, state: Cache, passes: Passes, writing: Writing) -> Answers:
        """What is written behind the cache that latents left, which took `passes`."""
        return after(
            self.decoder,
            questions,
            state,
            self.thoughts.eot,
            passes,
            replace(writing, prompt=()),
            eos_count=ends(writing),
            begins=partial(begun, writing.prompt),
        )
