"""Answer questions with a trained run, and look at the latent thoughts before its answers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laconic.batches import PassCounts
from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.memory_file import FILE_KIND
from laconic.compression.memory import SummaryMemory
from laconic.config.recipe import Recipe
from laconic.console import to_html_table
from laconic.data.reasoning.dataset import collate
from laconic.data.reasoning.encode import EncodedExample
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.experiment.from_recipe.methods import (
    answer_decoding,
    answer_questions,
    build_questions_batch,
    encode_questions,
)
from laconic.experiment.load_run import LoadedRun
from laconic.experiment.text_models.compressor import TextCompressor, as_compressor
from laconic.experiment.text_models.kv_compressor import MemorySource, load_kv_memories
from laconic.experiment.text_models.prompts import Answer, PreparedPrompts, PromptRow
from laconic.experiment.text_models.text_model import describe_decoder
from laconic.generation.config import GREEDY, GenerationConfig, check_type
from laconic.interfaces import ThinksInLatents
from laconic.latent.answering import AnswerDecoding, PromptedAnswers
from laconic.latent.rollout import LatentRollout
from laconic.latent.stepwise_rollout import check_tolerance
from laconic.latent.stop_head import count_valid_latents
from laconic.models.cache import KVCache
from laconic.models.checkpoints.weights import weights_fingerprint
from laconic.models.decoder import Decoder
from laconic.models.modes import eval_no_grad
from laconic.storage.atomic import read_artifact_kind

Memory = SummaryMemory | KVMemory


@dataclass(frozen=True, eq=False)
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

    Examples:
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
        check_type("run", self.run, LoadedRun, "what laconic.experiment.load_run returns; laconic.load opens a folder")
        latents = self.run.parts.latents
        check_tolerance(self.jacobi_tolerance, None if latents is None else latents.num_iterations)

    @property
    def method(self) -> nn.Module:
        """The training and answering method, such as `laconic.Kava`."""
        return self.run.method

    @property
    def decoder(self) -> Decoder:
        """The decoder, with a LoRA adapter merged into its weights if its method never disables it."""
        return self.run.parts.decoder

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return self.run.parts.tokenizer

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self.run.recipe

    def generate(
        self,
        questions: Sequence[str] | str,
        config: GenerationConfig = GREEDY,
        *,
        with_cot: bool = False,
        memory: Memory | str | Path | None = None,
    ) -> list[Answer]:
        """Answer questions as `laconic generate RUN` does: after latents, a written chain, or neither.

        All questions are one batch; `stream_answers` answers many in batches.

        Args:
            questions: Texts; a single text is one question.
            config: Length, sampling and stop strings. The data's format has the ids that end an answer.
            with_cot: For codi, pccot, kava and cot: write the chain of thought instead of latents.
            memory: What the questions are about, as for `read_memory`: of one text, or of one text per question.

        Returns:
            One `Answer` per question.

        Raises:
            UsageError: For `eos_token_ids`, for `stop_strings` with a method of one's own, or as `read_memory`.
        """
        check_type("questions", questions, Iterable, "a list of texts")
        texts = [questions] if isinstance(questions, str) else list(questions)
        batch_size = max(len(texts), 1)
        return list(self.stream_answers(texts, config, with_cot=with_cot, memory=memory, batch_size=batch_size))

    def stream_answers(
        self,
        questions: Sequence[str],
        config: GenerationConfig = GREEDY,
        *,
        with_cot: bool = False,
        memory: Memory | str | Path | None = None,
        batch_size: int = 8,
        start: int = 0,
    ) -> Iterator[Answer]:
        """Return an iterator over the answers that `generate` returns, computed in batches.

        All questions are checked and encoded before the first is answered.

        Args:
            questions: Texts.
            config: Length and sampling; its callbacks receive the index of a row in its batch.
            with_cot: As for `generate`.
            memory: As for `generate`.
            batch_size: Number of questions answered at once. It changes no answer beyond rounding.
            start: Index of the first question to answer, for continuing an interrupted call.

        Returns:
            One `Answer` per question from `start` on.

        Raises:
            UsageError: As for `generate`, or if `batch_size` or `start` is out of range.
            InputError: If a question has no tokens.
        """
        check_type("questions", questions, list | tuple, "a list of texts")
        for question in questions:
            check_type("questions", question, str, "a list of texts")
        check_type("batch_size", batch_size, int, "a number of questions")
        if batch_size < 1:
            raise UsageError(f"batch_size: must be at least 1, not {batch_size}; set 1 or more")
        check_type("start", start, int, "the index of a question")
        if not 0 <= start <= len(questions):
            raise UsageError(f"start: question {start} of {len(questions)}; give 0 to {len(questions)}")
        self.build_decoding(config)  # refuses options now
        rows = [PromptRow(f"question {number}", text) for number, text in enumerate(questions, 1)]
        prepared = replace(self.prepare(rows, memory if start < len(rows) else None), with_cot=with_cot)
        batches = prepared.generate_in_batches(config, batch_size, start)
        return (cast(Answer, answer) for batch in batches for answer in batch)

    def prepare(self, prompts: Sequence[PromptRow], memory: Memory | str | Path | None = None) -> "QuestionPrompts":
        """Encode questions (`prompts`), which are not echoed, after a `memory`; the errors are those of `generate`."""
        questions = [prompt.messages if prompt.text is None else prompt.text for prompt in prompts]
        examples = encode_questions(self.tokenizer, self.recipe.data, questions, [prompt.tools for prompt in prompts])
        state = None if memory is None else self.read_memory(memory, len(examples))
        prompts = [replace(prompt, should_echo=False) for prompt in prompts]
        return QuestionPrompts(prompts, [row.question_ids for row in examples], self, examples, state)

    def build_decoding(self, config: GenerationConfig) -> AnswerDecoding:
        """Return how answers are decoded with these options."""
        if config.eos_token_ids is not None:
            raise UsageError("eos_token_ids: the recipe's data.format ends an answer; remove them")
        if not isinstance(config.seed, int):
            raise UsageError("seed: give one number; rows are seeded by it and by their index")
        decoding = answer_decoding(self.tokenizer, self.recipe.data, config.max_tokens, config, config.seed)
        needs_text = config.on_token is not None or config.on_finish is not None or config.stop_list
        tokenizer = self.tokenizer if needs_text else None
        return replace(decoding, jacobi_tolerance=self.jacobi_tolerance, tokenizer=tokenizer)

    def compress(self, texts: Sequence[str], *, names: Sequence[str] = ()) -> SummaryMemory:
        """Compress documents, one per row, into summary vectors for `generate` and `think`.

        The metadata of the memory has their `names`; `memory.save(path)` stores it. `texts` are the documents.

        Raises:
            UsageError: If the run's recipe has no table [compression], or a document does not fit the model.
            InputError: For an empty document.
        """
        return self.compressor.compress(texts, names=names)

    @cached_property
    def compressor(self) -> TextCompressor:
        """The compressor of a run whose questions are about documents. Raises `UsageError` for another run."""
        return as_compressor(self.run)

    @torch.no_grad()
    def read_memory(self, memory: Memory | str | Path, num_questions: int = 1) -> KVCache:
        """Return the KV cache of the document that questions refer to.

        Args:
            memory: Summary vectors from `compress`, or keys and values that the decoder itself selected
                (`laconic.compress_kv`); or the file of one of them.
            num_questions: Number of rows of the cache; a memory of one text is repeated.

        Raises:
            UsageError: If the memory has another number of texts, or the run does not read its kind.
            CorruptArtifactError: If the memory is damaged or belongs to another model.
            InputError: If there is no such file.
        """
        if is_kv_memory(memory):
            cache = load_kv_memories(cast(MemorySource, memory), self.decoder, self.tokenizer).to_cache()
        else:
            compressor = self.compressor
            summaries = compressor.join_memories(cast(SummaryMemory | str | Path, memory))
            if summaries.metadata is not None:
                summaries.metadata.check_reader("the one given", compressor.metadata)
            with eval_no_grad(self.method):
                cache = compressor.method.segment_model.prefill_memory(summaries)
            if cache is None:
                raise UsageError("the memory is empty; compress a text")
        if cache.B not in (1, num_questions):
            raise UsageError(f"a memory of {cache.B} texts needs {cache.B} questions, one each, not {num_questions}")
        return cache if num_questions == cache.B else cache.repeat_rows(num_questions)

    @torch.no_grad()
    def think(self, question: str, *, memory: Memory | str | Path | None = None) -> Thoughts:
        """Compute the latents that the answer to a `question` follows; `memory`, of one text, is as for `read_memory`.

        Raises:
            UsageError: If the method has no latents, or this step of the run has none yet; or as `read_memory`.
        """
        check_type("question", question, str, "one question as text, and call think again for others")
        method = self.method
        if not isinstance(method, ThinksInLatents):
            name = self.recipe.method
            raise UsageError(
                f"method {name} has no latents; call generate, or load a run of coconut, codi, pccot or kava"
            )
        batch = build_questions_batch(self.tokenizer, self.recipe.data, [question])
        batch = batch.to(self.decoder.device)
        state = {} if memory is None else {"state": self.read_memory(memory)}
        rollout = cast(LatentRollout, method.think(batch, **state))
        M = rollout.latents.shape[1]
        if not M:
            raise UsageError(f"step {self.run.step} is in a stage without latents; load a later checkpoint")
        (n,) = count_valid_latents(rollout.cache, M)
        latents, hidden_states = rollout.latents[0, :n], rollout.hidden_states[0, :n]
        top = self.decoder.logits(hidden_states).argmax(-1).tolist()
        tokens = tuple(self.tokenizer.decode([i], skip_special_tokens=False) for i in top)
        return Thoughts(question, latents, hidden_states, tokens, rollout.cache, rollout.passes[0])

    def __repr__(self) -> str:
        recipe, folder = self.recipe, Path(self.run.folder).name
        return f"Reasoner({recipe.method}, {folder} step {self.run.step}, {describe_decoder(self.decoder)})"


@dataclass(frozen=True)
class QuestionPrompts(PreparedPrompts):
    """Questions for a `Reasoner`, after the KV cache of what they are about."""

    counts_passes = True
    model: Reasoner
    examples: Sequence[EncodedExample]
    state: KVCache | None = None  # of one row per question
    with_cot: bool = False

    @property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.model.method.state_dict().items())

    def describe_model(self) -> dict[str, Any]:
        return {"step": self.model.run.step, "method": self.model.recipe.method}

    def seed_rows(self, rows: range, config: GenerationConfig) -> GenerationConfig:
        return config  # `generate` seeds each row by its index

    def generate(self, rows: range, config: GenerationConfig) -> list[Answer]:
        model = self.model
        examples = self.examples[rows.start : rows.stop]
        decoding = model.build_decoding(config)
        state = self.state
        if config.stop_list and not isinstance(model.method, PromptedAnswers):
            raise UsageError("stop_strings: a method outside laconic ends its answers itself; remove them")
        answers = answer_questions(
            model.method,
            collate(examples, rows).to(model.decoder.device),
            decoding,
            with_cot=self.with_cot,
            state=state if state is None or len(rows) == state.B else state.select_rows(list(rows)),
        )
        results = list[Answer]()
        for i, ids in enumerate(answers.token_ids):
            if answers.stop_reasons:
                reason = answers.stop_reasons[i]
            else:  # of a method outside laconic
                is_full = len(ids) >= decoding.max_tokens and ids[-1] not in decoding.eos_token_ids
                reason = "length" if is_full else "eos"
            logprobs = answers.logprobs[i] if answers.logprobs else None
            num_tokens = len(examples[i].question_ids)
            results.append(
                Answer(
                    text=answers.texts[i],
                    token_ids=ids,
                    passes=answers.passes[i],
                    logprobs=logprobs,
                    stop_reason=reason,
                    num_prompt_tokens=num_tokens,
                )
            )
        return results


def is_kv_memory(memory: object) -> bool:
    """Return whether a memory, or the file or peft folder of one, holds keys and values rather than vectors."""
    if isinstance(memory, str | Path):
        path = Path(memory)
        return path.is_dir() or (path.is_file() and read_artifact_kind(path) == FILE_KIND)
    return isinstance(memory, KVMemory)
