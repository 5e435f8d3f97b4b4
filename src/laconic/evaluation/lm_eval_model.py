"""Models of laconic in EleutherAI's lm-evaluation-harness: checkpoints, runs that think, and memories.

lm-eval has no plug-ins for models, so `laconic-lm-eval`, which is its command line with the model `laconic` registered,
takes the place of `lm_eval`. In Python, importing this module registers the model.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from lm_eval.models.utils import postprocess_generated_text as cut_text
from torch import Tensor
from tqdm import tqdm

import laconic
from laconic.batches.padding import pad_rows
from laconic.errors import UsageError
from laconic.experiment.text_models.read_into_state import clear_attention_if_full
from laconic.generation.config import GenerationConfig
from laconic.losses import score_rows
from laconic.models.cache import KVCache
from laconic.nested.state import FastWeightState, select_rows

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

DEFAULT_BATCH_SIZE = 8
EncodedRequest = tuple[tuple[str, str], list[int], list[int]]


@register_model("laconic")
class LaconicLM(TemplateLM):
    """A checkpoint or a run as a model of lm-eval.

    `loglikelihood` and `loglikelihood_rolling` need a model that continues texts. A run that answers questions has
    `generate_until`, which takes the whole context as the question and answers after its latent thoughts. A model that
    learns begins every row with the fast weights of the run, or of a state that is given as memory.

    Args:
        pretrained: What `laconic.load` takes: checkpoint, GGUF file, hub or short name, run, or exported run.
        memory: File of `laconic compress` that every context follows, for a checkpoint, an AutoCompressor or a model
            that learns.
        batch_size: Rows per forward pass; "auto" for 8.
        device: Device of the model.
        dtype: Type of a checkpoint's weights.
        max_length: Positions of context and continuation; by default those of the model, without the memory's.
        max_gen_toks: New tokens where a task gives no limit.
        quantize: "int8" for weight-only int8.
        max_batch_size: Ignored; lm-eval always passes it.

    Raises:
        UsageError: If a memory is given for a model that reads none.
    """

    def __init__(
        self,
        pretrained: str,
        memory: str | None = None,
        batch_size: int | str = DEFAULT_BATCH_SIZE,
        device: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        quantize: Any = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.pretrained = pretrained
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):  # lm-eval's default
            device = "cpu"
        self.model = laconic.load(pretrained, device=device, dtype=dtype, quantize=quantize)
        self.tokenizer: Any = self.model.tokenizer
        self.batch_size = DEFAULT_BATCH_SIZE if str(batch_size).startswith("auto") else int(batch_size)
        self.max_gen_toks = max_gen_toks
        self._device = self.model.decoder.token_embedding.weight.device
        self.state: FastWeightState | None = None
        if memory is not None and isinstance(self.model, laconic.NestedTextModel):
            self.state, memory = self.model.load(memory), None
        self.cache, self.first_position = self.read_memory(memory)
        used = 0 if self.cache is None else self.first_position or int(self.cache.next_position.max())
        self.max_length = max_length or self.model.decoder.config.max_position_embeddings - used

    def read_memory(self, memory: str | None) -> tuple[KVCache | None, int | None]:
        """Return the cache of a memory, and the position after it if that is not the next one."""
        if memory is None:
            return None, None
        if isinstance(self.model, laconic.LanguageModel):
            return self.model.load_memory(memory).to_cache(), None
        if isinstance(self.model, laconic.TextCompressor):
            encoded = self.model.prepare_prompts(["x"], self.model.load(memory))
            return encoded.cache, None if encoded.positions is None else int(encoded.positions[0])
        raise UsageError(f"memory: {self.pretrained} reads no memories; remove memory")

    def reading_mode(self) -> AbstractContextManager[object]:
        """Return a context in which an adapter that only writes memories is off."""
        return self.model.reading_mode() if isinstance(self.model, laconic.TextCompressor) else nullcontext()

    @property
    def eot_token_id(self) -> int:
        """Id that ends a text."""
        eos = self.tokenizer.eos_token_id
        return self.model.decoder.config.eos_token_ids[0] if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """Id before a text that has no context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval caches requests."""
        return self.pretrained.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text; by default with special tokens, unless it begins with one or follows a memory."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = self.cache is None and self.state is None and not string.startswith(prefix)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[float]:
        """Return the log likelihood of whole texts, in windows of `max_length` with one token of context."""
        results: list[float] = []
        for (text,) in [request.args for request in requests]:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(("", ""), *utils.make_disjoint_window(window)) for window in windows]
            results.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), results[-1])
        return results

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests: list[EncodedRequest], disable_tqdm: bool = False, **_: Any) -> list[Any]:
        """Score continuations, in batches of rows of similar length."""
        if isinstance(self.model, laconic.Reasoner):
            raise UsageError(
                f"{self.pretrained} is a run that answers questions; lm-eval's loglikelihood tasks need a model that "
                "continues texts"
            )
        collator: Any = Collator(requests, lambda request: -len(request[1]) - len(request[2]))
        results: list[tuple[float, bool]] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for batch in collator.get_batched(n=self.batch_size):
                scores = self.score_batch([(context, continuation) for _, context, continuation in batch])
                for request, score in zip(batch, scores, strict=True):
                    results.append(score)
                    if request[0] != ("", ""):
                        self.cache_hook.add_partial("loglikelihood", request[0], score)
                bar.update(len(batch))
        return collator.get_original(results)

    def score_batch(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return the log probability of each continuation in nats, and whether greedy decoding would write it.

        Pairs are context and continuation; long contexts lose their beginning.
        """
        inputs = [(context + continuation)[-(self.max_length + 1) :][:-1] for context, continuation in pairs]
        ids, mask = pad_rows(inputs, pad_left=True, device=self._device)
        scores: list[tuple[float, bool]] = []
        for row, (_, continuation) in zip(self.read_batch(ids, mask), pairs, strict=True):
            targets = torch.tensor(continuation, device=self._device)
            nats, is_correct = score_rows(self.model.decoder.logits, row[-len(targets) :], targets)
            scores.append((-float(nats.sum()), bool(is_correct.all())))
        return scores

    def read_batch(self, ids: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Return the hidden states of rows padded on the left, each after the memory, or on the fast weights.

        Fast weights learn from what a row reads only where the model has no attention, as in `generate`: it could not
        condition on a context otherwise.
        """
        padding_mask, positions = None if mask.all() else mask, None
        if isinstance(self.model, laconic.NestedTextModel):
            model, state, updates = self.model.model, None, self.model.update_weights and not self.model.has_attention
            if self.state is not None:
                state = clear_attention_if_full(model, self.state, ids.shape[1], self.model.attention_window)
                state = select_rows(state, [0] * len(ids))
            output = model.read_tokens(ids, state, attention_mask=padding_mask, update_weights=updates)
            return output.hidden_states
        cache = None if self.cache is None else self.cache.repeat_rows(len(ids))
        if self.first_position is not None:
            positions = (self.first_position + mask.cumsum(1) - 1).clamp(min=0)
        decoder = self.model.decoder
        with self.reading_mode():
            return decoder(decoder.embed(ids), cache, attention_mask=padding_mask, position_ids=positions).hidden_states

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        """Write continuations or answers, in batches of requests with the same options."""
        arguments: list[Any] = [request.args for request in requests]
        collator: Any = Collator(arguments, lambda pair: -len(pair[0]), group_by="gen_kwargs")
        results: list[str] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for batch in collator.get_batched(n=self.batch_size):
                config, until = self.build_config(batch[0][1])
                texts = self.write_texts([context for context, _ in batch], config, until)
                for pair, text in zip(batch, texts, strict=True):
                    results.append(text)
                    self.cache_hook.add_partial("generate_until", pair, text)
                bar.update(len(batch))
        return collator.get_original(results)

    def build_config(self, options: dict[str, Any]) -> tuple[GenerationConfig, list[str]]:
        """Return the generation options and the stop strings of a task's `generation_kwargs`."""
        known: dict[str, Any] = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        until = [text for text in known.pop("until", []) if text]
        sampling: Any = {name: known[name] for name in ("top_p", "top_k") if known.get(name) is not None}
        temperature = float(known.get("temperature", 0.0)) if known.get("do_sample") else 0.0
        config = GenerationConfig(
            max_tokens=int(known["max_gen_toks"]), temperature=temperature, return_state=False, **sampling
        )
        return config, until

    def write_texts(self, contexts: Sequence[str], config: GenerationConfig, until: list[str]) -> list[str]:
        """Continue contexts, or answer them as questions, up to the first stop string."""
        if isinstance(self.model, laconic.Reasoner):
            return [cut_text(answer.text, until, None) for answer in self.model.generate(contexts, config)]
        if isinstance(self.model, laconic.NestedTextModel):
            generations = self.model.generate(contexts, self.state, config=config)
            return [cut_text(generation.text, until, None) for generation in generations]
        decoder, room = self.model.decoder, self.max_length - config.max_tokens
        if room < 1:
            raise UsageError(f"max_gen_toks={config.max_tokens} leaves no room in a context of {self.max_length}")
        eos = tuple(dict.fromkeys((*decoder.config.eos_token_ids, self.eot_token_id)))
        config = replace(config, stop_strings=tuple(until), eos_token_ids=eos)
        ids = [self.tok_encode(context)[-room:] for context in contexts]
        first = None if self.first_position is None else torch.full((len(ids),), self.first_position)
        cache = None if self.cache is None else self.cache.repeat_rows(len(ids))
        with self.reading_mode():
            generations = laconic.generate(
                decoder, self.tokenizer, input_ids=ids, state=cache, first_positions=first, config=config
            )
        # As `hf` decodes: the new ids alone, so that a SentencePiece tokenizer drops the space before the first word.
        return [cut_text(self.tokenizer.decode(generation.token_ids), until, None) for generation in generations]


def run_lm_eval() -> None:
    """Run lm-eval's command line, which now knows the model `laconic`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
