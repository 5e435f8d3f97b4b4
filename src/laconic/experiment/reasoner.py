"""Answer questions with a trained run, and look at the latent thoughts that its answers follow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laconic.batches import PassCounts
from laconic.config.recipe import Recipe
from laconic.console import to_html_table
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.experiment.load_run import LoadedRun
from laconic.experiment.methods import answer_decoding, answer_questions, build_questions_batch
from laconic.experiment.text_model import describe_decoder
from laconic.generation.config import GREEDY, GenerationConfig
from laconic.interfaces import ThinksInLatents
from laconic.latent.adaptive_rollout import check_tolerance
from laconic.latent.answering import AnswerDecoding
from laconic.latent.rollout import LatentRollout
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder


@dataclass(frozen=True)
class Answer:
    """The answer to one question: its text, its ids, and the decoder calls that it took."""

    text: str
    token_ids: tuple[int, ...]
    passes: PassCounts


@dataclass(frozen=True)
class Thoughts:
    """The latent thoughts about one question.

    Attributes:
        question: The question.
        latents: The M vectors that the decoder read in place of a written chain; the first N if a stop head keeps N.
        hidden_states: Hidden states at them, after the final norm.
        tokens: Logit lens: the most likely token at each latent. That a token can be read there does not show that
            the answer uses it; `laconic inspect` tests that.
        cache: KV cache of question and latents, which the answer continues.
        passes: Decoder calls so far.
    """

    question: str
    latents: Float[Tensor, "M D"]
    hidden_states: Float[Tensor, "M D"]
    tokens: tuple[str, ...]
    cache: KVCache
    passes: PassCounts

    def __repr__(self) -> str:
        M, D = self.latents.shape
        return f"Thoughts({self.question!r}, {M} latents of width {D}, {self.passes.total} passes: {self.tokens})"

    def _repr_html_(self) -> str:
        norms = self.latents.float().norm(dim=1).tolist()
        rows = [
            (str(m), token, f"{norm:.2f}") for m, (token, norm) in enumerate(zip(self.tokens, norms, strict=True), 1)
        ]
        return to_html_table(("latent", "most likely token", "norm"), rows)


@dataclass(frozen=True)
class Reasoner:
    """A run that answers questions: cot, nocot, icot, coconut, codi, pccot, kava, or a method of one's own.

    `laconic.load` returns one for the directory of such a run.

    Attributes:
        run: The loaded run, with recipe, step, model and method.
        jacobi_tolerance: For pccot and kava: end the Jacobi iterations of a question when their residual, the relative
            change of its latents, falls below this; 0 runs all of them. `dataclasses.replace` sets another one.

    Raises:
        UsageError: For a tolerance that is negative, or with a method that has no Jacobi iterations.

    Example:
        >>> import laconic
        >>> reasoner = laconic.load("runs/kava")
        >>> answers = reasoner.generate(["1+2*3=", "4*5-6="], laconic.GenerationConfig(max_tokens=4))
        >>> len(answers), answers[0].passes.latent
        (2, 1)
        >>> thoughts = reasoner.think("1+2*3=")
        >>> thoughts.latents.shape, len(thoughts.tokens)
        (torch.Size([2, 16]), 2)
    """

    run: LoadedRun
    jacobi_tolerance: float = 0.0

    def __post_init__(self) -> None:
        latents = self.run.parts.latents
        check_tolerance(self.jacobi_tolerance, None if latents is None else latents.num_iterations)

    @property
    def method(self) -> nn.Module:
        """The training and answering method, such as `laconic.Kava`."""
        return self.run.method

    @property
    def decoder(self) -> Decoder:
        """The decoder, with its adapter if it has one."""
        return self.run.parts.decoder

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return self.run.parts.tokenizer

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self.run.recipe

    @property
    def has_latents(self) -> bool:
        """Whether the method thinks in latents, so that `think` works."""
        return isinstance(self.method, ThinksInLatents)

    def generate(
        self, questions: Sequence[str] | str, config: GenerationConfig = GREEDY, *, with_cot: bool = False
    ) -> list[Answer]:
        """Answer questions as `laconic generate RUN` does: after latents, a written chain, or neither.

        Args:
            questions: Texts; a single text is one question.
            config: Length and sampling. Where an answer ends belongs to the data's format.
            with_cot: For codi, pccot and kava: write the chain of thought instead of latents.

        Returns:
            One `Answer` per question.

        Raises:
            UsageError: For `stop_strings` or `eos_token_ids`, or if the method writes no chain.
        """
        if config.stop_list or config.eos_token_ids is not None:
            raise UsageError("stop_strings and eos_token_ids: the recipe's data.format ends an answer; leave them out")
        texts = [questions] if isinstance(questions, str) else list(questions)
        if not texts:
            return []
        run = self.run
        decoding = self.build_decoding(config)
        batch = build_questions_batch(run.parts, run.recipe, texts).to(self.decoder.token_embedding.weight.device)
        answers = answer_questions(run.method, batch, decoding, with_cot=with_cot)
        return [Answer(*row) for row in zip(answers.texts, answers.token_ids, answers.passes, strict=True)]

    def build_decoding(self, config: GenerationConfig) -> AnswerDecoding:
        """Return how answers are decoded with these options.

        Raises:
            UsageError: If there are several seeds.
        """
        if not isinstance(config.seed, int):
            raise UsageError("seed: give one number; rows are seeded by it and by their index")
        decoding = answer_decoding(self.run.parts, self.recipe, config.max_tokens, config, config.seed)
        return replace(decoding, jacobi_tolerance=self.jacobi_tolerance)

    @torch.no_grad()
    def think(self, question: str) -> Thoughts:
        """Compute the latents that the answer to a question follows.

        Args:
            question: The question.

        Raises:
            UsageError: If the method has no latents, or this step of the run has none yet.
        """
        method = self.method
        if not isinstance(method, ThinksInLatents):
            name = self.recipe.method
            raise UsageError(f"method {name} has no latents; call generate, or load a run of coconut, codi or kava")
        batch = build_questions_batch(self.run.parts, self.recipe, [question])
        batch = batch.to(self.decoder.token_embedding.weight.device)
        rollout = cast(LatentRollout, method.think(batch))
        if not rollout.latents.shape[1]:
            raise UsageError(f"step {self.run.step} is in a stage without latents; load a later step")
        (n,) = rollout.count_latents()
        latents, hidden_states = rollout.latents[0, :n], rollout.hidden_states[0, :n]
        top = self.decoder.logits(hidden_states).argmax(-1).tolist()
        tokens = tuple(self.tokenizer.decode([i], skip_special_tokens=False) for i in top)
        return Thoughts(question, latents, hidden_states, tokens, rollout.cache, rollout.passes[0])

    def __repr__(self) -> str:
        recipe, folder = self.recipe, Path(self.run.folder).name
        return f"Reasoner({recipe.method}, {folder} step {self.run.step}, {describe_decoder(self.decoder)})"
