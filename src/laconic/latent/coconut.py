"""Coconut: replace step after step of the chain by latents, each the hidden state of the one before it.

Coconut arXiv:2412.06769. Its equation is `rollout.run_sequential_rollout` without a projection.

Symbols: k steps removed, n latents, c latents per step.
"""

from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.config.methods import CoconutConfig
from laconic.errors import UsageError
from laconic.interfaces import StepOutput
from laconic.latent.answering import LatentReasoning
from laconic.latent.cot import compute_single_loss, drop_chain_prefix
from laconic.latent.rollout import read_after_latents
from laconic.latent.thoughts import LatentThoughts, check_parts
from laconic.losses import build_teacher_targets, count_scored
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.rng import uniform


class Coconut(LatentReasoning):
    """Coconut: question, bot, latents, eot, the remaining steps, answer; everything after eot is scored.

    Args:
        decoder: The model.
        latent_thoughts: Control vectors with the sequential schedule and no projection.
        config: Stages and latents per step.
        steps_per_epoch: Optimizer steps in an epoch.
        seed: Seed of the uniform stages.

    Raises:
        UsageError: If the latents do not fit the stages.

    Examples:
        >>> import laconic
        >>> from laconic.config.data import DigitsConfig
        >>> from laconic.config.methods import CoconutConfig
        >>> from laconic.data.synthetic.digits import DigitsDataset
        >>> data = DigitsDataset(0, DigitsConfig())
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> latents = laconic.LatentThoughts(decoder, num_latents=6, schedule="sequential", projection="none")
        >>> method = laconic.Coconut(decoder, latents, CoconutConfig(), steps_per_epoch=10)
        >>> output = method(data.batch([0], epoch=0, step=0))
        >>> sorted(output.metrics)
        ['student', 'student_token_accuracy']
    """

    writes_chain: ClassVar[bool] = True

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
        check_parts(decoder, latent_thoughts, config, CoconutConfig)
        num_latents = max(1, config.max_stage * config.latents_per_step)
        required = {
            'latents.schedule = "sequential"': latent_thoughts.schedule == "sequential",
            'latents.projection = "none"': latent_thoughts.projection is None,
            f"latents.num_latents = {num_latents} (coconut.max_stage times coconut.latents_per_step)": (
                latent_thoughts.num_latents == num_latents
            ),
        }
        unmet = [text for text, is_met in required.items() if not is_met]
        if unmet:
            raise UsageError(f"coconut requires {' and '.join(unmet)}")
        self.decoder, self.latent_thoughts, self.config = decoder, latent_thoughts, config
        self.steps_per_epoch, self.seed = steps_per_epoch, seed
        self.eval_stage: int | None = None  # stage whose latents an answer uses; None: the last one

    def get_stage(self, epoch: int) -> int:
        """Return the stage of an epoch from 0, before random stages."""
        return self.config.first_stage + epoch // self.config.epochs_per_stage

    def sample_stages(self, batch: ReasoningBatch) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
        """Return k and n of each row; random stages are drawn only in training."""
        config = self.config
        steps = torch.zeros(batch.B, dtype=torch.long, device=batch.chain_ids.device)
        if batch.chain_ids.shape[1]:
            steps = (batch.chain_step_index + 1).masked_fill(~batch.chain_mask, 0).amax(1)
        stage = torch.full_like(steps, self.get_stage(batch.epoch))
        if self.training and config.uniform_stage_prob:
            row = batch.row_index.cpu().numpy()[:, None]
            u = uniform(self.seed, batch.epoch, row, torch.arange(2).numpy()[None])
            is_random, fraction = torch.as_tensor(u).to(steps.device).unbind(1)
            stage = torch.where(is_random < config.uniform_stage_prob, (fraction * (steps + 1)).long(), stage)
        last = torch.full_like(steps, config.max_stage)
        replaced = last if config.pad_latent_to_max else torch.minimum(steps, last)
        is_after_last = stage > config.max_stage  # then the whole chain is removed
        num_latents = torch.where(is_after_last, replaced, stage) * config.latents_per_step
        return torch.where(is_after_last, steps, stage), num_latents

    def _drop_steps(self, batch: ReasoningBatch, k: Int[Tensor, " B"]) -> ReasoningBatch:
        """Return the batch without the first k steps of each chain."""
        return drop_chain_prefix(batch, batch.chain_step_index >= k[:, None])

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        remaining = self._drop_steps(batch, self.sample_stages(batch)[0])
        return {"student": count_scored(build_teacher_targets(remaining))}

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Return loss and accuracy of a `batch`; `state` is the KV cache of what precedes the questions."""
        k, n = self.sample_stages(batch)
        remaining = self._drop_steps(batch, k)
        max_latents = int(n.max())
        question = self.decoder.embed(batch.question_ids)
        cache = self.latent_thoughts.think(
            self.decoder, state, question=question, attention_mask=batch.question_mask, num_latents=max_latents
        ).cache
        # rows with fewer latents than the others do not attend to their last ones
        latents_valid = torch.arange(max_latents, device=n.device) < n[:, None]
        cache = cache.with_valid(torch.cat([cache.valid[:, : cache.S - max_latents], latents_valid], 1))
        ids = torch.cat([remaining.chain_ids, remaining.answer_ids], 1)
        mask = torch.cat([remaining.chain_mask, remaining.answer_mask], 1)
        hidden = read_after_latents(self.decoder, self.latent_thoughts.end, ids, mask, cache).hidden_states
        return compute_single_loss("student", self.decoder, hidden, build_teacher_targets(remaining), batch)

    def resets_optimizer_state(self, batch: ReasoningBatch) -> bool:
        """Return whether this is the first step of an epoch other than the first."""
        return batch.step > 0 and batch.step % self.steps_per_epoch == 0

    @property
    def num_answer_latents(self) -> int:
        """Number of latents before an answer, those of `eval_stage`.

        Raises:
            UsageError: If it depends on the chain, which is not known before the answer.
        """
        if not self.config.pad_latent_to_max:
            raise UsageError("pad_latent_to_max=false: the number of latents depends on the chain to be predicted")
        stage = self.config.max_stage if self.eval_stage is None else min(self.eval_stage, self.config.max_stage)
        return stage * self.config.latents_per_step
