"""Models of laconic in EleutherAI's lm-evaluation-harness: checkpoints, runs that think, and memories.

lm-eval has no plug-ins for models, so `laconic-lm-eval`, which is its command line with the model `laconic` registered,
takes the place of `lm_eval`. In Python, importing this module registers the model.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
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
from laconic.data.strict_jsonl import make_excerpt
from laconic.errors import InputError, UsageError
from laconic.experiment.text_models.read_into_state import clear_attention_if_full
from laconic.experiment.text_models.text_model import find_eos_ids
from laconic.generation.config import GenerationConfig
from laconic.losses import score_rows
from laconic.models.cache import KVCache
from laconic.nested.state import FastWeightState, select_rows
from laconic.rng import hash64

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

DEFAULT_BATCH_SIZE = 8
END_MARK = "\ue000"  # a private character, where a message ends
GENERATION_OPTIONS = (  # of GenerationConfig, under the same name in `generation_kwargs`
    "top_k", "top_p", "min_p", "repetition_penalty", "min_tokens", "seed", "suppress_token_ids", "eos_count",
    "update_on_prompt", "update_on_output",
)  # fmt: skip
NEUTRAL_OPTIONS = {  # of transformers and vLLM, with the value that changes nothing
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "length_penalty": 1, "early_stopping": False,
    "no_repeat_ngram_size": 0, "typical_p": 1, "frequency_penalty": 0, "presence_penalty": 0,
}  # fmt: skip
HARMLESS_OPTIONS = ("use_cache", "pad_token_id")  # no value changes the text
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
        revision: Commit, tag or branch on the hub.
        add_bos_token: Whether texts are encoded with special tokens such as BOS; by default as `tok_encode` chooses.
        max_batch_size: Ignored; lm-eval always passes it.
        trust_remote_code: Ignored; code in checkpoints is never run.
        unknown: Refused by name.

    Raises:
        UsageError: If an argument does not exist, no model is named, or a memory is given for a model that reads none.
    """

    def __init__(
        self,
        pretrained: str = "",
        memory: str | None = None,
        batch_size: int | str = DEFAULT_BATCH_SIZE,
        device: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        quantize: Any = None,
        revision: str | None = None,
        add_bos_token: bool | None = None,
        max_batch_size: int | None = None,
        trust_remote_code: bool | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown or not pretrained:
            problem = f"no argument {', '.join(unknown)}" if unknown else "pretrained is missing"
            raise UsageError(f"model_args: {problem}")
        self.pretrained, self.add_bos_token = pretrained, add_bos_token
        self.batch_size = parse_batch_size(batch_size)
        if device is None or (device == "cuda:0" and not torch.cuda.is_available()):  # lm-eval's defaults
            device = "auto"
        self.model = laconic.load(pretrained, device=device, dtype=dtype, revision=revision, quantize=quantize)
        self.tokenizer: Any = self.model.tokenizer
        self.max_gen_toks = max_gen_toks
        self._device = self.model.decoder.device
        self.state: FastWeightState | None = None
        if memory is not None and isinstance(self.model, laconic.NestedTextModel):
            self.state = self.model.load_memory(memory)
            memory = None
        self.cache, self.first_position = self.read_memory(memory)
        used = 0 if self.cache is None else self.first_position or int(self.cache.next_position.max())
        room = self.model.decoder.config.max_position_embeddings - used
        self.max_length = room if max_length is None else max_length
        limit = room if self.model.decoder.config.position_encoding == "table" else self.max_length
        if not 1 <= self.max_length <= limit:
            raise UsageError(f"model_args: max_length={max_length}: give 1 to {room:,}, the model's free positions")

    def read_memory(self, memory: str | None) -> tuple[KVCache | None, int | None]:
        """Return the cache of a memory, and the position after it if that is not the next one."""
        if memory is None:
            return None, None
        if isinstance(self.model, laconic.LanguageModel):
            return self.model.load_memory(memory).to_cache(), None
        if isinstance(self.model, laconic.TextCompressor):
            encoded = self.model.prepare_prompts(["x"], self.model.load_memory(memory))
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
            adds_bos = self.cache is None and self.state is None if self.add_bos_token is None else self.add_bos_token
            add_special_tokens = adds_bos and not string.startswith(prefix)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render messages; without a generation prompt the last one, which a task begins, is left open as in `hf`."""
        last = chat_history[-1]["content"]
        if not add_generation_prompt:  # marks where the last message ends
            chat_history = [*chat_history[:-1], {**chat_history[-1], "content": f"{last}{END_MARK}"}]
        render = partial(self.tokenizer.apply_chat_template, add_generation_prompt=add_generation_prompt)
        try:
            text: str = render(chat_history)
        except InputError:  # templates without a system role
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            text = render(others)
        if not add_generation_prompt and END_MARK not in text:
            raise UsageError("the chat template does not print the last message, which the task begins")
        return text.partition(END_MARK)[0]

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
            raise UsageError(f"{self.pretrained} answers questions; loglikelihood needs a model that continues texts")
        for request in requests:
            n = len(request[2])
            if not 1 <= n <= self.max_length:
                limits = f"the model laconic scores 1 to {self.max_length:,}"
                raise UsageError(f"the continuation {make_excerpt(request[0][1])} has {n:,} tokens; {limits}")
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
        padding_mask = None if mask.all() else mask
        positions = None
        if isinstance(self.model, laconic.NestedTextModel):
            model = self.model.model
            state = None
            updates = self.model.update_weights and not self.model.has_attention
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
        arguments: list[Any] = [(*request.args[:2], index) for index, request in enumerate(requests)]
        for options in {str(options): options for _, options, _ in arguments}.values():
            self.build_config(options)  # refuses options before the first text is generated
        collator: Any = Collator(arguments, lambda triple: -len(triple[0]), group_by="gen_kwargs")
        results: list[str] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for batch in collator.get_batched(n=self.batch_size):
                contexts, options, indices = zip(*batch, strict=True)
                config, until = self.build_config(options[0])
                # Every request has a seed, so that repeats of a question differ; a run takes one for a batch.
                seeds: list[int] = hash64(cast(int, config.seed), np.array(indices)).tolist()
                config = replace(config, seed=seeds[0] if isinstance(self.model, laconic.Reasoner) else seeds)
                texts = self.write_texts(contexts, config, until)
                for pair, text in zip(zip(contexts, options, strict=True), texts, strict=True):
                    results.append(text)
                    self.cache_hook.add_partial("generate_until", pair, text)
                bar.update(len(batch))
        return collator.get_original(results)

    def build_config(self, options: dict[str, Any]) -> tuple[GenerationConfig, list[str]]:
        """Return the generation options and the stop strings of a task's `generation_kwargs`.

        Raises `UsageError` for an option that would change the text and that laconic does not have.
        """
        present = {name: value for name, value in options.items() if value is not None}
        rest: dict[str, Any] = dict(normalize_gen_kwargs(present, self.max_gen_toks))
        until = [text for text in rest.pop("until") if text]
        max_tokens = int(rest.pop("max_gen_toks"))
        temperature = float(rest.pop("temperature", 0.0))
        if rest.pop("do_sample") and not temperature:
            raise UsageError("gen_kwargs: do_sample needs a temperature above 0; add temperature=1.0")
        settings: dict[str, Any] = {"seed": torch.initial_seed()}  # which lm-eval's --seed sets
        settings |= {name: rest.pop(name) for name in GENERATION_OPTIONS if name in rest}
        if not isinstance(settings["seed"], int):
            raise UsageError(f"gen_kwargs: seed={settings['seed']!r}; give one integer")
        unknown = {
            name: x for name, x in rest.items() if name not in HARMLESS_OPTIONS and NEUTRAL_OPTIONS.get(name) != x
        }
        if unknown:
            raise UsageError(f"gen_kwargs: {', '.join(f'{name}={x!r}' for name, x in unknown.items())} not supported")
        return GenerationConfig(max_tokens, temperature=temperature, return_state=False, **settings), until

    def write_texts(self, contexts: Sequence[str], config: GenerationConfig, until: list[str]) -> list[str]:
        if isinstance(self.model, laconic.Reasoner):
            return [cut_text(answer.text, until, None) for answer in self.model.generate(contexts, config)]
        if isinstance(self.model, laconic.NestedTextModel):
            config = replace(config, stop_strings=tuple(until))
            generations = self.model.generate(contexts, config, memory=self.state)
            return [cut_text(generation.text, until, None) for generation in generations]
        decoder = self.model.decoder
        room = self.max_length - config.max_tokens
        if room < 1:
            raise UsageError(f"max_gen_toks={config.max_tokens} leaves no room in a context of {self.max_length}")
        eos = tuple(dict.fromkeys((*find_eos_ids(decoder.config), self.eot_token_id)))
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


def parse_batch_size(text: object) -> int:
    if str(text).startswith("auto"):
        return DEFAULT_BATCH_SIZE
    if not str(text).isdecimal() or int(str(text)) < 1:
        raise UsageError(f"batch_size={text}: give a number of 1 or more, or auto")
    return int(str(text))


def run_lm_eval() -> None:
    """Run lm-eval's command line, which now knows the model `laconic`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
