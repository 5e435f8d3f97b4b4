"""`laconic demo read`: a chapter in an eighth of its KV cache, beside the full text and no text."""

import time
from dataclasses import dataclass
from pathlib import Path

from laconic.cli.arguments import Device, OutputFormat, command_line
from laconic.cli.files import write_file
from laconic.console import log_message, pluralize, progress, status

TITLE = "The Falling Star, from The War of the Worlds by H. G. Wells (1898); text of Standard Ebooks, CC0"


@dataclass(frozen=True)
class DemoReadCommand:
    """Answer three questions about a chapter from a memory of an eighth of it, with the full text, and without.

    Takes about a minute on two cores. Needs a pretrained model: make model downloads SmolLM2-135M-Instruct.

    Example: laconic demo read
    """

    model: str = "smollm2"
    """plain model with a context of 2,048 or more: folder, hub name, .gguf or short name"""
    out: Path = Path("runs/demo-read")
    """directory to write memory.safetensors and report.html to"""
    device: Device = "auto"
    format: OutputFormat = "human"

    def run(self) -> int:
        import torch

        import laconic
        from laconic.cli.commands.evaluate import print_report
        from laconic.evaluation.compression import reading_demo
        from laconic.evaluation.suite import EvalReport
        from laconic.evaluation.tables import figures_to_json

        start = time.monotonic()
        with status(f"loading {self.model}"):
            decoder = laconic.Decoder.from_pretrained(self.model, device=self.device)
            tokenizer = laconic.load_tokenizer(decoder.source_folder or self.model)
        chapter = reading_demo.CHAPTER_FILE.read_text(encoding="utf-8").strip()
        with progress("demo") as show:
            comparison = reading_demo.compare_reading(
                decoder, tokenizer, chapter, reading_demo.QUESTIONS, self.out / "memory.safetensors", show
            )
        threads = pluralize(torch.get_num_threads(), "thread")
        facts = [
            ("model", self.model),
            ("device", f"{decoder.device}, {threads}, PyTorch {torch.__version__}"),
            ("chapter", f"{comparison.tokens:,} tokens: {TITLE}"),
            ("time", f"{time.monotonic() - start:.0f} s"),
            ("command", command_line()),
        ]
        write_file(self.out / "report.html", reading_demo.render_reading_page(comparison, TITLE, chapter, facts))
        results, answers = reading_demo.build_sections(comparison)
        costs, *notes = results.blocks
        tables = [block for table in answers.blocks for block in ("", table)]
        blocks = [costs, *tables, "", *notes]
        data = {"schema": 1, "model": self.model, **figures_to_json(comparison)}
        print_report(EvalReport(blocks, data), self.format)
        log_message(f"laconic demo read: {time.monotonic() - start:.0f} s")
        return 0
