"""`laconic tasks list`: the names that `laconic evaluate --tasks` accepts."""

from dataclasses import dataclass
from typing import NamedTuple

from laconic.cli.arguments import OutputFormat
from laconic.cli.files import print_json, print_rows


class TaskInfo(NamedTuple):
    name: str
    runs: str
    description: str


ANY, LATENT, COMPRESSION, NESTED = "any", "models, latent", "compression", "nested"  # kinds of runs
MODELS, MEMORIES, CLASSES = "models", "models, compression", "models, nested"
TASKS = (
    TaskInfo("test, valid", ANY, "the recipe's own test or validation rows"),
    TaskInfo("FILE.jsonl", LATENT, "rows (question, answer); also .parquet"),
    TaskInfo("USER/NAME[:CONFIG]:SPLIT", LATENT, "a data set on the Hugging Face hub"),
    TaskInfo("excerpt", COMPRESSION, "documents whose end is copied from an earlier part"),
    TaskInfo(
        "FILE.jsonl", COMPRESSION, "context QA (context, question, answer) or in-context classification (text, label)"
    ),
    TaskInfo(
        "memories",
        MEMORIES,
        "compressed memories and plain baselines on continuation, copied passages, needles and questions",
    ),
    TaskInfo("loss", MODELS, "nats per token on windows of the texts of --documents"),
    TaskInfo("mqar", NESTED, "multi-query associative recall"),
    TaskInfo("copying", NESTED, "selective copying"),
    TaskInfo("continual_translation", NESTED, "words of languages taught one after another"),
    TaskInfo("formal_languages", NESTED, "formal languages"),
    TaskInfo("needle", NESTED, "facts inserted into long texts"),
    TaskInfo("ppl", NESTED, "loss on held-out texts in nats per token, with weight updates on and off"),
    TaskInfo("books", NESTED, "loss in nats per token when the state is carried through a book, and when it is reset"),
    TaskInfo("levels", NESTED, "ablations: the loss when a level, the momentum, the decay or another part is off"),
    TaskInfo(
        "clinc150, banking77, dbpedia14", CLASSES, "class-incremental learning; slow: limit with --limit and --shots"
    ),
    TaskInfo("classes:FILE", CLASSES, "the same on a .jsonl or .parquet file with text, label and optionally split"),
)


@dataclass(frozen=True)
class TasksListCommand:
    """List the tasks of laconic evaluate, and the kinds of runs that each one takes.

    laconic tasks list prints the same list.

    Example: laconic tasks list
    """

    format: OutputFormat = "human"

    def run(self) -> int:
        from laconic.data.reasoning.catalog import DATASETS

        catalog = [TaskInfo(info.name, LATENT, info.description) for info in DATASETS.values()]
        tasks = [*TASKS[:1], *catalog, *TASKS[1:]]
        if self.format == "json":
            print_json({"schema": 1, "tasks": [task._asdict() for task in tasks]})
            return 0
        print_rows(("task", "runs", "measures"), tasks)
        return 0
