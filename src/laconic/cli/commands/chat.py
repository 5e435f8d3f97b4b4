"""`laconic chat`: a conversation with a model on a terminal, or on a pipe, one turn a line."""

import contextlib
import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from laconic.cli.arguments import OptionalStr, check_minimum, check_utf8, refuse_flags
from laconic.cli.files import check_memories, check_model, write_file
from laconic.cli.generate_output import GenerationTimer, write_text
from laconic.cli.model_flags import ModelFlags, SamplingFlags, import_with_status
from laconic.console import log_message, log_note, status
from laconic.errors import BusyError, InputError, LaconicError, UsageError

if TYPE_CHECKING:
    from laconic.experiment.text_models.chat_session import ChatSession
    from laconic.experiment.text_models.nested_model import NestedTextModel
    from laconic.generation.config import GenerationConfig

PROMPT = ">>> "
COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
HELP = """/reset        begin a new conversation
/system TEXT  set the system message; without TEXT, print it
/save FILE    write the messages as JSON
/load FILE    replace the conversation with the messages of a JSON file
/exit         end, as Ctrl-D does
//TEXT        say /TEXT: a message that begins with a slash
Ctrl-C stops an answer and keeps the conversation."""


class UnknownCommandError(UsageError):
    """A line that looks like a command but is unknown."""


@dataclass(frozen=True)
class ChatCommand(ModelFlags, SamplingFlags):
    """Chat with a model; only new tokens are read in each turn.

    On a terminal: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends. On a pipe, each line is a turn and the
    replies are printed; after an unknown command the exit code is 2. A message that begins with / is written with //.

    Example: laconic chat smollm2 --system "You are a chemist."

    Example: laconic chat smollm2 --memory book.safetensors
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """model (folder in Hugging Face layout, .gguf, hub name, or smollm2), or a run of method autocompressor"""
    system: OptionalStr = None
    """system message"""
    memory: UseAppendAction[tuple[Path, ...]] = ()
    """file(s) written by laconic compress, which precede the conversation, or one with the state of fast weights"""
    max_tokens: int = 1024
    """largest number of tokens of a reply"""

    def run(self) -> int:
        check_minimum(1, max_tokens=self.max_tokens)
        replace(self, sample=False).sampling_config(self.max_tokens)  # refuses numbers out of range
        check_model(self.model)
        check_memories(self.memory, self.system)
        import_with_status(f"loading {self.model}")
        with status(f"loading {self.model}"):
            session = self.open_session()
        config = self.sampling_config(self.max_tokens, session.decoder.source_folder)
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        exit_code = 0
        if is_terminal:
            log_note(f"{self.model}, context of {session.context_size:,} tokens; /help lists the commands")
        for text in read_turns(is_terminal):
            command = COMMAND.fullmatch(text)
            if command and command[1] in ("exit", "quit"):
                break
            try:
                if command:
                    run_command(session, command[1], (command[2] or "").strip())
                else:
                    turn = text.removeprefix("/") if text.startswith("//") else text
                    answer(session, turn, config, is_terminal)
            except UnknownCommandError as error:
                log_message(f"laconic: {error}")
                exit_code = 0 if is_terminal else error.exit_code
            except LaconicError as error:
                if not is_terminal:
                    raise
                log_message(f"laconic: {error}")
        return exit_code

    def open_session(self) -> "ChatSession":
        import laconic
        from laconic.experiment.from_recipe.untrained_levels import is_state_file
        from laconic.experiment.text_models.chat_session import ChatSession
        from laconic.experiment.text_models.state_chat import StateChatSession

        state = next(filter(is_state_file, self.memory), None)
        model = self.load_model(self.model) if state is None else self.load_with_state(state)
        if isinstance(model, laconic.Reasoner):
            raise UsageError(f"{self.model} is a {type(model).__name__}, which does not chat; use laconic generate")
        if model.tokenizer.chat_template is None:
            message = f"{self.model} has no chat template (base models have none), so it does not chat"
            raise InputError(f"{message}; use laconic generate, or the model's instruction-tuned version")
        if isinstance(model, laconic.NestedTextModel):
            return StateChatSession(model, *self.memory, system=self.system)
        prefix = model.open_prefix(self.memory) if self.memory else None
        return ChatSession(model.decoder, model.tokenizer, system=self.system, prefix=prefix)

    def load_with_state(self, state: Path) -> "NestedTextModel":
        from laconic.cli.nested import load_model

        if len(self.memory) > 1:
            raise UsageError(f"--memory: {len(self.memory)} files; a conversation continues one fast-weight state")
        refuse_flags(self, ("sample", "quantize"), "not available for a model with fast weights")
        return load_model(self, state)


def read_turns(is_terminal: bool) -> Iterator[str]:
    """Yield the lines of standard input that are not blank; on a terminal, with a prompt, editing and history."""
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() then edits lines and keeps a history
    while True:
        try:
            text = check_utf8(input(PROMPT if is_terminal else "")).strip()
        except EOFError:
            if is_terminal:
                write_text("\n")
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            write_text("\n")
            log_note("Ctrl-D ends the conversation")
            continue
        if text:
            yield text


def run_command(session: "ChatSession", name: str, argument: str) -> None:
    from laconic.data.messages import read_messages

    match name:
        case "reset":
            session.reset()
            log_note("new conversation")
        case "system" if argument:
            session.set_system(argument)
            log_note("system message set; the conversation goes on")
        case "system":
            log_message(session.system or "no system message")
        case "save" | "load" if not argument:
            raise UsageError(f"/{name}: give a file")
        case "save":
            check_holds_messages(Path(argument))
            write_file(Path(argument), json.dumps(session.messages, ensure_ascii=False, indent=2) + "\n")
        case "load":
            session.load_messages(read_messages(Path(argument)))
            log_note(f"{len(session.messages)} messages loaded")
        case "help":
            log_message(HELP)
        case _:
            raise UnknownCommandError(f"/{name}: no such command; /help lists them, //{name} is a message")


def check_holds_messages(path: Path) -> None:
    """Raise `BusyError` for an existing file that is no saved conversation, which must not be replaced."""
    if not path.is_file() or not path.stat().st_size:
        return
    from laconic.data.messages import read_messages

    try:
        read_messages(path)
    except LaconicError:
        raise BusyError(f"{path} exists and is not a saved conversation; choose another file") from None


def answer(session: "ChatSession", text: str, config: "GenerationConfig", is_terminal: bool) -> None:
    timer = GenerationTimer()
    interrupt = threading.Event()

    def print_token(row: int, token: int, text: str, logprob: float) -> bool:
        timer.on_token()
        write_text(text)
        return interrupt.is_set()

    options = replace(config, on_prefill=timer.on_prefill, on_token=print_token)
    catch = catch_interrupt(interrupt, lambda: timer.first_token_seconds is not None)
    try:
        with catch if is_terminal else contextlib.nullcontext():
            generation = session.reply(text, options)
    except KeyboardInterrupt:  # before the first token
        timer.close_progress()
        if not is_terminal:
            raise
        log_note("\nstopped; the question is not part of the conversation")
        return
    write_text("\n")
    timer.add([generation], config.max_tokens)
    if is_terminal:
        stopped = "stopped; " if generation.stop_reason == "cancelled" else ""
        log_note(f"{stopped}{timer.describe()}")
    num_tokens = session.num_reused + generation.num_prompt_tokens + len(generation.token_ids)
    if num_tokens >= session.context_size:
        log_message(
            f"the context of {session.context_size:,} tokens is full; /save FILE keeps the messages, /reset starts over"
        )


@contextlib.contextmanager
def catch_interrupt(event: threading.Event, can_wait: Callable[[], bool]) -> Iterator[None]:
    """Let Ctrl-C set an event; if it cannot wait, and the second time, it raises KeyboardInterrupt as usual."""

    def handle(number: int, frame: FrameType | None) -> None:
        if event.is_set() or not can_wait():
            raise KeyboardInterrupt
        event.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
