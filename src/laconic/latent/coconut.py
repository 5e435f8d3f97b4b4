"""Coconut: step by step of the chain gives way to latents, each the hidden state of the one before it.

Coconut arXiv:2412.06769; its equation is `core.rollout.sequential` with no map between.

Symbols: k steps removed, n latents, c latents for a step.
"""

from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor, nn

from laconic.batches import AnswerBatch, ReasoningBatch, StepOutput
from laconic.config.methods import CoconutConfig
from laconic.errors import UsageError
from laconic.generation.generate import PassCounts
from laconic.latent.answering import AnswerDecoding, answer_from_cache, eval_no_grad
from laconic.latent.cot import (
    build_teacher_targets,
    check_no_teacher,
    count_expected_eos,
    count_scored,
    drop_chain_prefix,
    find_answer_offset,
    make_single_loss_output,
    masked_cross_entropy,
)
from laconic.latent.rollout import Intervention, LatentRollout, run_sequential_rollout
from laconic.latent.thoughts import LatentThoughts
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.rng import uniform


class Coconut(nn.Module):
    """Coconut whole: question, bot, latents, eot, the steps that are left, answer; all after eot scored."""

    def __init__(
        self,
        decoder: Decoder,
        latent_thoughts: LatentThoughts,
        config: CoconutConfig,
        *,
        steps_per_epoch: int,
        seed: int = 0,
    ) -> None:
        super().__init__()
        most = config.max_stage * config.latents_per_step
        if (latent_thoughts.schedule, latent_thoughts.projection, latent_thoughts.num_latents) != (
            "sequential",
            None,
            max(1, most),
        ):
            raise UsageError(
                f"coconut: {latent_thoughts.num_latents} {latent_thoughts.schedule} thoughts; choose {most} sequential ones, project none"
            )
        self.decoder, self.latent_thoughts, self.config = decoder, latent_thoughts, config
        self.steps_per_epoch, self.seed = steps_per_epoch, seed
        self.eval_stage: int | None = None  # whose latents an answer takes; none: the last stage

    def get_stage(self, epoch: int) -> int:
        """The stage of an epoch, before any draw."""
        return self.config.first_stage + epoch // self.config.epochs_per_stage

    def sample_stages(self, batch: ReasoningBatch) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
        """k and n of each row; outside training no stage is drawn."""
        how, device = self.config, batch.chain_ids.device
        steps = torch.zeros(batch.B, dtype=torch.long, device=device)
        if batch.chain_ids.shape[1]:
            steps = (batch.chain_step_index + 1).masked_fill(~batch.chain_mask, 0).amax(1)
        stage = torch.full_like(steps, self.get_stage(batch.epoch))
        if self.training and how.uniform_stage_prob:
            u = uniform(self.seed, batch.epoch, batch.row_index.cpu().numpy()[:, None], torch.arange(2).numpy()[None])
            which, where = torch.as_tensor(u).to(device).unbind(1)
            stage = torch.where(which < how.uniform_stage_prob, (where * (steps + 1)).long(), stage)
        last = torch.full_like(steps, how.max_stage)
        most = last if how.pad_latent_to_max else torch.minimum(steps, last)
        over = stage > how.max_stage
        return torch.where(over, steps, stage), torch.where(over, most, stage) * how.latents_per_step

    def drop_steps(self, batch: ReasoningBatch, k: Int[Tensor, " B"]) -> ReasoningBatch:
        """The batch without the first k steps of each chain."""
        return drop_chain_prefix(batch, batch.chain_step_index >= k[:, None])

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        """Tokens, or rows, that are scored."""
        return {
            "student": count_scored(
                build_teacher_targets(self.drop_steps(batch, self.sample_stages(batch)[0])), self.config.ce_reduction
            )
        }

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        k, n = self.sample_stages(batch)
        left, most = self.drop_steps(batch, k), int(n.max())
        rolled = self.run_latents(batch, most, state)
        thought = torch.arange(most, device=n.device) < n[:, None]
        before = rolled.cache.valid[:, : rolled.cache.S - most]
        held = rolled.cache.with_valid(torch.cat([before, thought], 1))
        words = self.decoder.embed(torch.cat([left.chain_ids, left.answer_ids], 1))
        eot = self.latent_thoughts.end.to(words.dtype).expand(batch.B, 1, -1)
        live = torch.cat([torch.ones_like(k, dtype=torch.bool)[:, None], left.chain_mask, left.answer_mask], 1)
        hidden = self.decoder(torch.cat([eot, words], 1), held, live=live).hidden
        targets = build_teacher_targets(left)
        total = (
            count_scored(targets, self.config.ce_reduction)
            if batch.loss_denominators is None
            else batch.loss_denominators["student"]
        )
        logits = partial(self.latent_thoughts.logits, self.decoder)
        return make_single_loss_output(
            "student", masked_cross_entropy(logits, hidden, targets, self.config.ce_reduction, total)
        )

    def run_latents(
        self,
        batch: ReasoningBatch,
        num_latents: int,
        state: KVCache | None = None,
        intervention: Intervention | None = None,
        record_passes: bool = False,
    ) -> LatentRollout:
        """Question and bot read in one pass, then n latents."""
        words = self.decoder.embed(batch.question_ids)
        bot = self.latent_thoughts.begin.to(words.dtype).expand(batch.B, 1, -1)
        live = torch.cat([batch.question_mask, batch.question_mask.new_ones(batch.B, 1)], 1)
        prefix = torch.cat([words, bot], 1)
        return run_sequential_rollout(
            self.decoder, prefix, num_latents, self.latent_thoughts.project, state, live, intervention, record_passes
        )

    def resets_optimizer_state(self, batch: ReasoningBatch) -> bool:
        """At the first step of every epoch but the first."""
        return batch.step > 0 and batch.step % self.steps_per_epoch == 0

    def think(
        self, questions: ReasoningBatch, intervention: Intervention | None = None, record_passes: bool = False
    ) -> LatentRollout:
        """The latents on questions: as many as `stage` has. Raises `Usage` (2)."""
        if not self.config.pad_latent_to_max:
            raise UsageError(
                "pad_latent_to_max false: the number of latents would be read off the chain that is asked for"
            )
        stage = self.config.max_stage if self.eval_stage is None else min(self.eval_stage, self.config.max_stage)
        with eval_no_grad(self):
            return self.run_latents(questions, stage * self.config.latents_per_step, None, intervention, record_passes)

    def answer(self, questions: ReasoningBatch, decoding: AnswerDecoding, *, with_cot: bool = False) -> AnswerBatch:
        """What follows latents and eot: the steps that are left, prompt, answer. Raises `Usage` (2) for a teacher."""
        check_no_teacher(with_cot, "Coconut")
        rolled = self.think(questions)
        return self.answer_after_latents(questions, rolled.cache, rolled.passes, decoding)

    def answer_after_latents(
        self, questions: ReasoningBatch, cache: KVCache, passes: PassCounts, decoding: AnswerDecoding
    ) -> AnswerBatch:
        """What is written behind the cache that latents left, which took `passes`."""
        return answer_from_cache(
            self.decoder,
            questions,
            cache,
            self.latent_thoughts.end,
            passes,
            replace(decoding, answer_prompt=()),
            eos_count=count_expected_eos(decoding),
            answer_offset=partial(find_answer_offset, decoding.answer_prompt),
        )
