"""`laconic generate`: continue prompts, reply to chat messages, or answer questions with a trained run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from laconic.cli.arguments import (
    OptionalFloat,
    OptionalInt,
    OptionalPath,
    OptionalStr,
    OutputFormat,
    check_minimum,
    refuse_flags,
)
from laconic.cli.files import (
    STANDARD_INPUT,
    check_file,
    check_memories,
    check_model,
    check_new_file,
    check_replaceable,
    print_json,
)
from laconic.cli.generate_output import GenerationPrinter, GenerationTimer, find_done_file, generation_to_json
from laconic.cli.model_flags import ModelFlags, SamplingFlags, import_with_status
from laconic.console import log_message, pluralize, status
from laconic.errors import UsageError
from laconic.storage.temporary import is_device_or_pipe

if TYPE_CHECKING:
    from laconic.config.recipe import Recipe
    from laconic.experiment.text_models.prompts import GeneratedText, PreparedPrompts, PromptRow, TextModel
    from laconic.generation.config import GenerationConfig

ModelKind = Literal["language model", "compressor", "fast weights", "reasoner"]
DEFAULT_MAX_TOKENS = 128
REASONING_FLAGS = ("with_cot", "jacobi_tolerance")
RECIPE_FLAGS = ("allow_missing", "dtype", "revision", "quantize")


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
    prompts: Annotated[Positional[tuple[str, ...]], arg(metavar="[PROMPT ...]", help_behavior_hint="")]
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
    """JSONL file whose rows have a prompt, question or messages (for a run: only with data.format = "chat"); each is
    written with a field generation, which replaces one of this name; - reads standard input"""
    output: OptionalPath = None
    """with --input: JSONL file to write; an interrupted command continues when repeated, and does nothing once OUTPUT
    is complete, as OUTPUT.done records (default: standard output)"""
    batch_size: int = 8
    """with --input: rows to process at once; what a row samples depends on --seed and its number alone"""
    memory: UseAppendAction[tuple[Path, ...]] = ()
    """file(s) written by laconic compress, prepended to every prompt or conversation in order; for a model with fast
    weights, one file with its state, which every prompt continues"""
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
        import_with_status(f"loading {self.model}")
        if self.checkpoint != "latest":
            return replace(self, model=str(self.find_step()), checkpoint="latest").run()
        hub_run = self.find_hub_run()
        if hub_run is not None:
            return replace(self, model=str(hub_run), revision=None).run()
        self.check_flags()
        rows = self.read_prompts()
        with status(f"loading {self.model}"):
            prompts = self.prepare(rows)
        config = self.generation_config(prompts.model.decoder.source_folder)
        timer = GenerationTimer(shows_progress=self.input is None, counts_passes=prompts.counts_passes)
        if self.input is None:
            self.print_generations(prompts, config, timer)
        else:
            from laconic.cli.generate_batch import generate_rows

            generate_rows(self, prompts, config, timer)
        if timer.num_full:
            answers = "the answer" if timer.rows == 1 else f"{timer.num_full:,} of {timer.rows:,} answers"
            position = prompts.model.decoder.config.max_position_embeddings
            log_message(
                f"{answers} ended at position {position:,}, where the context of {self.model} is full; "
                "--allow-long-prompt goes on, but the text may be poor"
            )
        is_plain = not self.memory and any(row.text is not None for row in rows)
        if timer.num_empty and is_plain and prompts.model.tokenizer.chat_template and self.kind == "language model":
            log_message(
                f"{self.model} ended {timer.num_empty:,} of {pluralize(timer.rows, 'text')} at once; it has a chat "
                "template, which --chat uses"
            )
        return 0

    def generation_config(self, folder: Path | None = None) -> "GenerationConfig":
        config = self.sampling_config(self.max_tokens or DEFAULT_MAX_TOKENS, folder)
        return replace(config, min_tokens=self.min_tokens, update_on_prompt=self.learn or None)

    def find_step(self) -> Path:
        """Return the folder of the checkpoint that `--checkpoint` names; raise `UsageError` (2) if it is missing."""
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

    def find_hub_run(self) -> Path | None:
        """Return the downloaded folder of a run on the hub, whose recipe decides which flags and rows fit."""
        from laconic.experiment.load_model import check_is_model
        from laconic.experiment.load_run import find_run, is_export
        from laconic.models.checkpoints.weights import find_checkpoint

        if Path(self.model).expanduser().exists() or find_run(self.model) is not None:
            return None
        check_is_model(self.model)
        folder = find_checkpoint(self.model, self.revision, with_weights=False)
        return find_checkpoint(self.model, self.revision) if is_export(folder) else None

    @cached_property
    def recipe(self) -> "Recipe | None":
        from laconic.experiment.load_run import read_run_recipe

        return read_run_recipe(self.model)

    @cached_property
    def kind(self) -> ModelKind:
        """What the model is opened as; a checkpoint that learns, or continues a state, has fast weights."""
        from laconic.experiment.from_recipe.untrained_levels import is_state_file
        from laconic.experiment.load_autocompressor import is_compressor
        from laconic.experiment.load_run import is_nested

        if self.learn or any(map(is_state_file, self.memory)) or is_nested(self.model):
            return "fast weights"
        if is_compressor(self.model):
            return "compressor"
        return "language model" if self.recipe is None or self.recipe.method == "lm" else "reasoner"

    def validate(self) -> None:
        """Raise `UsageError` (2) for flags that do not fit one another, and `BusyError` (73) if the output exists."""
        sources = {"PROMPT": self.prompts, "--file": self.file, "--messages": self.messages, "--input": self.input}
        present = [name for name, value in sources.items() if value]
        if len(present) > 1:
            raise UsageError(f"{present[0]} and {present[1]} given; give one of {', '.join(sources)}")
        if not present:
            raise UsageError("no prompt given; laconic generate MODEL PROMPT, or - for standard input, or --file PATH")
        if self.system is not None and not (self.chat or self.messages or self.input):
            raise UsageError("--system: needs --chat or --messages, or --input with messages")
        if self.output is not None and self.input is None:
            raise UsageError(f"--output {self.output}: needs --input")
        if self.output is not None:
            if not find_done_file(self.output).is_file():  # else the output may be complete
                check_new_file("--output", self.output)
            if is_device_or_pipe(self.output):
                raise UsageError(f"--output {self.output} is not a regular file; leave it out to print the rows")
        if self.max_tokens == 0 and not (self.learn and self.save_state is not None):
            raise UsageError("--max-tokens 0: only with --learn and --save-state, which then store what was read")
        check_minimum(0, max_tokens=self.max_tokens)
        check_minimum(1, batch_size=self.batch_size)
        if self.logprobs and self.format != "json" and self.input is None:
            raise UsageError("--logprobs: needs --format json or --input")
        replace(self, sample=False).generation_config()  # refuses numbers out of range
        check_model(self.model)
        if not self.learn:
            refuse_flags(self, ("save_state", "inner_lr"), "needs --learn")
        if self.save_state is not None:
            refuse_flags(self, ("input",), "not available with --save-state")
            check_replaceable("--save-state", self.save_state)
        self.check_inputs()

    def check_inputs(self) -> None:
        for path in (self.file, self.messages):
            if path is not None and str(path) != STANDARD_INPUT:
                check_file(path, "an existing file, or - for standard input")
        if self.input is not None and str(self.input) != STANDARD_INPUT:
            from laconic.data.reasoning.catalog import refuse_csv

            refuse_csv(self.input)
            check_file(
                self.input, 'a .jsonl whose rows have "prompt", "messages" or "question", or - for standard input'
            )
        stray = next((text for text in self.prompts if text.endswith(".safetensors") and " " not in text), None)
        if self.memory and stray is not None:
            raise UsageError(f"{stray} is taken as a prompt; write --memory before each memory")
        check_memories(self.memory, self.system)

    def check_flags(self) -> None:
        """Raise `UsageError` (2) for flags that do not fit the kind of model, before it is loaded."""
        if self.kind == "fast weights":
            flags = (*REASONING_FLAGS, "sample", "allow_long_prompt", "quantize", "allow_missing")
            refuse_flags(self, flags, "not available for a model with fast weights")
        if len(self.memory) > 1 and self.kind in ("fast weights", "reasoner"):
            reads = "takes one state" if self.kind == "fast weights" else "reads one memory"
            raise UsageError(f"--memory: {len(self.memory)} files; {self.model} {reads}")
        if self.kind in ("compressor", "reasoner"):
            flags = ("chat", "system", "sample", "allow_long_prompt", "quantize")
            flags = (*flags, "messages") if self.kind == "compressor" else flags
            refuse_flags(self, flags, "not available for a run of this method")
        if self.kind in ("compressor", "language model"):
            reason = f"{self.model} is not a run {'that answers questions' if self.recipe else 'of laconic train'}"
            refuse_flags(self, REASONING_FLAGS, reason)
        if self.kind != "fast weights" and (self.recipe is not None or self.kind == "compressor"):
            refuse_flags(self, RECIPE_FLAGS, "not available for a run; its recipe fixes it")

    def read_prompts(self) -> "list[PromptRow]":
        from laconic.cli.generate_prompts import read_message_file, read_prompt_rows, read_texts, to_questions

        columns = {} if self.recipe is None or self.kind != "reasoner" else self.recipe.data.columns
        if self.input is not None:
            rows = read_prompt_rows(self.input, self.chat, self.system, columns.get("question", "question"))
        elif self.messages is not None:
            rows = [read_message_file(self.messages, self.system)]
        else:
            rows = read_texts(self.prompts, self.file)
            rows = [row.to_chat(self.system) for row in rows] if self.chat else rows
        if self.kind == "reasoner" and self.recipe is not None:
            rows = to_questions(rows, self.recipe.data, self.recipe.reads_documents and not self.memory)
        return rows

    def load(self) -> "TextModel":
        """Load the model. Raises `UsageError` (2) for one that does not learn, or answers no questions."""
        import laconic

        if self.kind == "fast weights":
            from laconic.cli.nested import load_model

            nested = load_model(self, self.memory[0] if self.memory else None)
            if self.learn and not nested.update_weights:
                raise UsageError(f"--learn: the recipe of {self.model} has inner_loop.enabled = false; remove --learn")
            return nested
        model = self.load_model(self.model, self.allow_missing)
        if isinstance(model, laconic.Reasoner):
            return replace(model, jacobi_tolerance=self.jacobi_tolerance or 0.0)
        if self.kind == "reasoner" and self.recipe is not None:
            raise UsageError(
                f"{self.model}: method {self.recipe.method} has no `answer`, so it answers no questions; give the "
                "class one, or continue texts in Python with laconic.load(RUN, allow_code=True).generate(TEXT)"
            )
        return model

    def prepare(self, rows: "Sequence[PromptRow]") -> "PreparedPrompts":
        from laconic.experiment.text_models.language_model import TextPrompts
        from laconic.experiment.text_models.reasoner import QuestionPrompts

        prompts = self.load().prepare(rows, self.memory[0] if len(self.memory) == 1 else self.memory or None)
        if isinstance(prompts, TextPrompts) and not self.allow_long_prompt:
            return prompts.end_in_context(self.model)
        return replace(prompts, with_cot=self.with_cot) if isinstance(prompts, QuestionPrompts) else prompts

    def print_generations(self, prompts: "PreparedPrompts", config: "GenerationConfig", timer: GenerationTimer) -> None:
        """Generate for all prompts as one batch, print the texts or JSON, and save the state if a flag says so."""
        from laconic.experiment.text_models.nested_model import StatePrompts

        state = None
        generations = list["GeneratedText"]()
        if isinstance(prompts, StatePrompts):
            prompts = replace(prompts, on_reading=timer.on_reading)
        if self.max_tokens == 0 and isinstance(prompts, StatePrompts):
            state = prompts.read()
            timer.prompt_tokens = sum(map(len, prompts.ids))
        else:
            labels = [p.title + (p.text or "" if p.should_echo and not self.no_echo else "") for p in prompts.prompts]
            printer = GenerationPrinter(labels, timer, is_silent=self.format == "json")
            try:
                generations += prompts.generate(range(len(labels)), printer.attach(config))
            finally:  # ends the line of a text that Ctrl-C cut off
                printer.finish(generations, config.max_tokens)
        if self.format == "json":
            results = [
                prompt.to_json() | generation_to_json(generation, self.logprobs)
                for prompt, generation in zip(prompts.prompts, generations, strict=state is None)
            ]
            metadata = {"schema": 1, "model": self.model} | prompts.describe_model()
            print_json(metadata | timer.to_json() | {"generations": results})
        elif state is None:
            log_message(timer.describe())
        if self.save_state is not None and isinstance(prompts, StatePrompts):
            state = prompts.save_state(self.save_state, generations, state)
            num_bytes = self.save_state.stat().st_size
            num_tokens = int(state.position.sum())
            log_message(f"wrote {self.save_state}, {num_bytes:,} bytes: {num_tokens:,} tokens read so far")
