"""`laconic generate`: continue prompts, reply to chat messages, or answer questions with a trained run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from laconic.cli.arguments import (
    OptionalFloat,
    OptionalInt,
    OptionalPath,
    OptionalStr,
    OutputFormat,
    check_minimum,
    parse_dtype,
    refuse_flags,
)
from laconic.cli.files import check_memories, check_new_file, print_json
from laconic.cli.generate_output import GenerationPrinter, generation_to_json
from laconic.cli.generate_prompts import (
    PromptRow,
    find_row_stop_ids,
    read_message_file,
    read_prompt_rows,
    read_texts,
    title_rows,
    to_chat,
)
from laconic.cli.model_flags import ModelFlags, SamplingFlags
from laconic.console import log_message, status
from laconic.errors import UsageError
from laconic.storage.temporary import is_device_or_pipe

if TYPE_CHECKING:
    from laconic import Decoder, Generation, GenerationConfig
    from laconic.compression.kv.memory import KVMemory
    from laconic.data.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128
REASONING_FLAGS = ("with_cot", "jacobi_tolerance")
RECIPE_FLAGS, RECIPE_REASON = ("allow_missing", "dtype", "revision"), "not available for a run; its recipe fixes it"


@dataclass(frozen=True)
class GenerateCommand(ModelFlags, SamplingFlags):
    """Generate text, optionally conditioned on memories; for a run, answer with its method.

    A PROMPT is printed and continued. With --chat, only the reply is printed.

    Example: laconic generate stories260k "Once upon a time" --max-tokens 196

    Example: cat letter.txt | laconic generate smollm2 - --chat --system "Summarize in one sentence."

    Example: laconic generate smollm2 --input questions.jsonl --output answers.jsonl --chat

    Example: laconic generate smollm2 --file chapter.txt --learn --save-state state.safetensors
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """model (folder in Hugging Face layout, .gguf, hub name, smollm2 or stories260k), or a run of laconic train"""
    prompts: Annotated[Positional[tuple[str, ...]], arg(metavar="PROMPT", help_behavior_hint="")]
    """prompts to continue or questions to answer; several are one batch; - reads standard input"""
    file: OptionalPath = None
    """text file with the prompt; only the continuation is printed, as for standard input"""
    no_echo: bool = False
    """print the continuation of a PROMPT without the prompt"""
    chat: bool = False
    """wrap each prompt in the model's chat template, as a user message"""
    system: OptionalStr = None
    """with chat messages: system message to put first"""
    messages: OptionalPath = None
    """JSON file with a list of chat messages (role, content) to reply to; - reads standard input"""
    input: OptionalPath = None
    """JSONL file whose rows have a prompt, question or messages (for a run: no messages); each is written with a field
    generation; - reads standard input"""
    output: OptionalPath = None
    """with --input: JSONL file to write; an interrupted command continues when repeated (default: standard output)"""
    batch_size: int = 8
    """with --input: rows to process at once; what a row samples depends on --seed and its number alone"""
    memory: UseAppendAction[tuple[Path, ...]] = ()
    """file(s) written by laconic compress, prepended to every prompt or conversation in order; for a model with fast
    weights, one file with its state"""
    learn: bool = False
    """let prompt and answer update the fast weights of a Hope model, or the MLPs of a checkpoint; see --save-state"""
    inner_lr: OptionalFloat = None
    """with --learn and a checkpoint: learning rate of its MLPs (default: 0.1)"""
    save_state: OptionalPath = None
    """with --learn: file for the state after prompt and answer, for --memory"""
    max_tokens: OptionalInt = None
    """largest number of new tokens (default: 128); a model's answer ends earlier where its context is full; 0 with
    --save-state: only read"""
    min_tokens: int = 0
    """number of new tokens before which no end-of-sequence token is generated"""
    allow_long_prompt: bool = False
    """read prompts, and write answers, longer than the context that the model was trained on; the text may be poor"""
    checkpoint: str = "latest"
    """for runs: latest, best (by validation during training), or the step of a checkpoint"""
    with_cot: bool = False
    """for runs: generate the chain of thought before the answer"""
    jacobi_tolerance: OptionalFloat = None
    """for runs of pccot and kava: end the Jacobi iterations of a question once the latents' relative change is below
    this (default: 0, run all)"""
    allow_missing: UseAppendAction[tuple[str, ...]] = ()
    """tensor that may be missing from the checkpoint; it is then initialised at random"""
    logprobs: bool = False
    """in JSON output: add the log probability of each new token, in nats"""
    format: OutputFormat = "human"

    def run(self) -> int:
        self.validate()
        if self.checkpoint != "latest":
            return replace(self, model=str(self.find_step()), checkpoint="latest").run()
        from laconic.experiment.from_recipe.untrained_levels import is_state_file
        from laconic.experiment.load_autocompressor import is_compressor
        from laconic.experiment.load_run import read_run_method
        from laconic.experiment.text_models.nested_model import is_nested

        if self.learn or any(map(is_state_file, self.memory)) or is_nested(self.model):
            from laconic.cli.nested import generate_text

            return generate_text(self)
        check_memories(self.memory, self.system)
        refuse_flags(self, ("save_state", "inner_lr"), "needs --learn")
        if is_compressor(self.model):
            return self.generate_with_memory(self.read_plain_prompts())
        if read_run_method(self.model) is not None and not self.is_language_model_run:
            from laconic.cli.generate_answers import answer_prompts

            return answer_prompts(self)
        refuse_flags(self, REASONING_FLAGS, f"{self.model} is not a run of laconic train")
        return self.generate_with_checkpoint(self.read_prompts())

    def find_step(self) -> Path:
        """Return the folder of the checkpoint that `--checkpoint` names; raise `UsageError` (2) if there is none."""
        from laconic.evaluation.runs import resolve_step
        from laconic.experiment.load_model import check_is_model
        from laconic.experiment.load_run import check_not_empty_run, is_run_dir
        from laconic.storage.run_dir import RunDirectory

        folder = Path(self.model)
        check_not_empty_run(folder)
        if not is_run_dir(folder):
            check_is_model(folder)
            raise UsageError(f"--checkpoint: {self.model} is not the directory of a run; remove --checkpoint")
        step = resolve_step(folder, self.checkpoint)
        assert step is not None
        return RunDirectory(folder).step_path(step)

    @cached_property
    def is_language_model_run(self) -> bool:
        """Whether the model is a run of method lm, which continues texts as a checkpoint does."""
        from laconic.experiment.load_run import read_run_method

        return read_run_method(self.model) == "lm"

    def validate(self) -> None:
        """Raise `UsageError` (2) for flags that do not fit one another, and `BusyError` (73) if the output exists."""
        sources = {"PROMPT": self.prompts, "--file": self.file, "--messages": self.messages, "--input": self.input}
        present = [name for name, value in sources.items() if value]
        if len(present) > 1:
            raise UsageError(f"{present[0]} and {present[1]} given; give one of {', '.join(sources)}")
        if self.system is not None and not (self.chat or self.messages or self.input):
            raise UsageError("--system: needs --chat or --messages, or --input with messages")
        if self.output is not None and self.input is None:
            raise UsageError(f"--output {self.output}: needs --input")
        if self.output is not None:
            check_new_file("--output", self.output)
            if is_device_or_pipe(self.output):
                raise UsageError(f"--output {self.output} is not a regular file; leave it out to print the rows")
        if self.max_tokens == 0 and not (self.learn and self.save_state is not None):
            raise UsageError("--max-tokens 0: only with --learn and --save-state, which then store what was read")
        check_minimum(0, max_tokens=self.max_tokens)
        check_minimum(1, batch_size=self.batch_size)
        if self.logprobs and self.format != "json" and self.input is None:
            raise UsageError("--logprobs: needs --format json or --input")
        replace(self, sample=False).generation_config()  # numbers out of range are refused before the model is loaded

    def read_prompts(self, question_column: str = "question") -> list[PromptRow]:
        if self.input is not None:
            return read_prompt_rows(self.input, self.chat, self.system, question_column)
        if self.messages is not None:
            return [read_message_file(self.messages, self.system)]
        rows = read_texts(self.prompts, self.file)
        return [to_chat(row, self.system) for row in rows] if self.chat else rows

    def read_plain_prompts(self, question_column: str | None = None) -> list[PromptRow]:
        """Return the prompts of a run, which are texts, or rows of a file if their `question_column` is given."""
        names = ("chat", "system", "messages", "sample", "allow_long_prompt", "quantize")
        names += ("input",) if question_column is None else ()
        refuse_flags(self, names, "not available for a run of this method")
        return self.read_prompts(question_column or "question")

    def generation_config(self, folder: Path | None = None) -> "GenerationConfig":
        """Return the options of generation that the flags set; `folder` holds the published ones of `--sample`."""
        config = self.sampling_config(self.max_tokens or DEFAULT_MAX_TOKENS, folder)
        return replace(config, min_tokens=self.min_tokens)

    def generate_with_checkpoint(self, rows: list[PromptRow]) -> int:
        """Continue prompts, or reply to messages, with a checkpoint in Hugging Face layout, after a memory if given."""
        from laconic.cli.generate_context import ContextLimit
        from laconic.experiment.text_models.kv_compressor import build_row_caches, load_kv_memories

        with status(f"loading {self.model}"):
            decoder, tokenizer = self.load_decoder()
            memory = load_kv_memories(self.memory, decoder, tokenizer) if self.memory else None
        if memory is None:
            ids = [row.encode(tokenizer) for row in rows]
        else:
            rows, ids = encode_after_memory(rows, tokenizer, memory)
        limit = ContextLimit(decoder, self.model, may_exceed=self.allow_long_prompt)
        limit.check_prompts(rows, ids, memory)
        config = self.generation_config(decoder.source_folder)
        config = replace(config, eos_token_ids=find_row_stop_ids(rows[0], decoder, tokenizer))
        if self.input is not None:
            from laconic.cli.generate_batch import generate_rows

            generate_rows(self, limit, tokenizer, rows, ids, config, memory)
            return 0
        printer = self.build_printer(rows)
        state = None if memory is None else build_row_caches(memory, range(len(rows)))
        generations = limit.generate(tokenizer, ids, state, printer.attach(config))
        self.print_generations(rows, generations, decoder, printer)
        limit.log_ended()
        return 0

    def load_decoder(self) -> "tuple[Decoder, Tokenizer]":
        import laconic
        from laconic.experiment.load_model import check_is_model, load_plain_model
        from laconic.experiment.load_run import is_export

        if self.is_language_model_run:
            refuse_flags(self, (*RECIPE_FLAGS, "quantize"), RECIPE_REASON)
            model = laconic.load(self.model, device=self.device)
            return model.decoder, model.tokenizer
        check_is_model(self.model)
        decoder, tokenizer = load_plain_model(
            self.model,
            device=self.device,
            dtype=parse_dtype(self.dtype),
            revision=self.revision,
            quantize=self.quantize,
            allow_missing=self.allow_missing,
        )
        if decoder.source_folder is not None and is_export(decoder.source_folder):
            folder = decoder.source_folder
            raise UsageError(f"{self.model} is a run exported to the hub, downloaded to {folder}; use that folder")
        return decoder, tokenizer

    def generate_with_memory(self, rows: list[PromptRow]) -> int:
        """Continue prompts on the concatenated memories; a single prompt is repeated for each text of a memory."""
        import laconic
        from laconic.compression.memory import SummaryMemory

        refuse_flags(self, REASONING_FLAGS, "not available for a run of autocompressor")
        refuse_flags(self, RECIPE_FLAGS, RECIPE_REASON)
        with status(f"loading {self.model}"):
            compressor = laconic.load(self.model, device=self.device)
            assert isinstance(compressor, laconic.TextCompressor)
            memories = [compressor.load_memory(path) for path in self.memory]
            memory = SummaryMemory.concat_segments(*memories) if memories else None
        prompts = [row.text or "" for row in rows]
        if memory is not None:
            rows = title_rows(rows, memory.B, memory.metadata.documents if memory.metadata else ())
        printer = self.build_printer(rows)
        generations = compressor.generate(prompts, printer.attach(self.generation_config()), memory=memory)
        self.print_generations(rows, generations, compressor.decoder, printer)
        return 0

    def build_printer(self, rows: Sequence[PromptRow]) -> GenerationPrinter:
        labels = [row.title + (row.text or "" if row.should_echo and not self.no_echo else "") for row in rows]
        return GenerationPrinter(labels, is_silent=self.format == "json")

    def print_generations(
        self,
        prompts: Sequence[PromptRow],
        generations: "Sequence[Generation]",
        decoder: "Decoder",
        printer: GenerationPrinter,
    ) -> None:
        printer.finish(generations)
        if self.format == "json":
            rows = [
                prompt.to_json() | generation_to_json(generation, self.logprobs)
                for prompt, generation in zip(prompts, generations, strict=True)
            ]
            metadata = {"schema": 1, "model": self.model, "weights": decoder.fingerprint}
            print_json(metadata | printer.timer.to_json() | {"generations": rows})
            return
        log_message(printer.timer.describe())


def encode_after_memory(
    rows: Sequence[PromptRow], tokenizer: "Tokenizer", memory: "KVMemory"
) -> tuple[list[PromptRow], list[list[int]]]:
    """Return as many prompts as texts of a memory, and their ids; after a memory of a chat they are user messages."""
    from laconic.experiment.text_models.kv_compressor import encode_messages, encode_prompt, is_chat_memory
    from laconic.experiment.text_models.text_model import match_prompts

    with_tools = next((row for row in rows if row.tools), None)
    if with_tools is not None:
        raise UsageError(f"{with_tools.name}: tools cannot follow a memory, whose text is already in the prompt")
    rows = [to_chat(row, None) for row in rows] if is_chat_memory(memory) else rows
    rows = title_rows(rows, memory.B, memory.metadata.documents if memory.metadata else ())
    rows = match_prompts(rows, memory.B)
    ids = [
        encode_messages(tokenizer, memory, row.messages)
        if row.text is None
        else encode_prompt(tokenizer, memory, row.text)
        for row in rows
    ]
    return rows, ids
