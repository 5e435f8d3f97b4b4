"""Loading of reasoning data sets: files and Hub agree, sizes are checked, the union has 18,588 rows."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from laconic.config.data import DataConfig
from laconic.data.reasoning.catalog import DATASETS
from laconic.data.reasoning.load import (
    get_answer_kind,
    load_examples,
    load_held_out,
    load_training_examples,
)
from laconic.errors import InputError
from tests.conftest import needs

Rows = list[dict[str, Any]]
Hub = Callable[[dict[tuple[str, str], Rows]], None]


def build_config(**more: Any) -> DataConfig:
    return DataConfig.model_validate({"source": "catalog", "name": "gsm8k", **more})


@pytest.fixture
def root(shared: Path) -> str:
    return str(shared / "data")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A fake Hub of tables with the published columns, stored as Parquet and read by `datasets`."""
    needs("datasets")
    import datasets
    import pyarrow
    from pyarrow import parquet

    def publish(tables: dict[tuple[str, str], Rows]) -> None:
        def load_dataset(repo: str, config: str | None, *, split: str, revision: str | None) -> datasets.Dataset:
            rows = [row for part in split.split("+") for row in tables[repo, part]]
            parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table.parquet")
            queries.append((repo, config, revision))
            return datasets.Dataset.from_dict(parquet.read_table(tmp_path / "table.parquet").to_pydict())

        queries.clear()
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    return publish


queries: list[tuple[str, str | None, str | None]] = []


def published(path: Path, make: Callable[[dict[str, Any]], dict[str, Any]]) -> Rows:
    return [make(json.loads(line)) for line in path.open(encoding="utf-8")]


def texts(read: Any) -> list[tuple[str, tuple[str, ...], str]]:
    return [(e.question, e.steps, e.answer) for e in read.examples]


LOCAL_DATASETS = [
    name for name, one in DATASETS.items() if any(split.file for split in one.splits.values()) and name != "gsm8k-nl"
]


@pytest.mark.parametrize("name", LOCAL_DATASETS)
def test_load_examples_of_local_files(name: str, root: str) -> None:
    for part, split in DATASETS[name].splits.items():
        read = load_examples(
            f"{name}:{part}",
            "train",
            build_config(data_dir=root, size_check="off" if name == "gsm8k-aug" else "strict"),
        )
        assert split.file is not None
        assert len(read.examples) == (split.marked_rows or split.file.num_rows)
        assert read.sha256 == split.file.sha256


def test_load_examples_chains(root: str) -> None:
    config = build_config(data_dir=root)
    assert load_examples("gsm8k", "test", config).examples[0].steps == ("<<16-3-4=9>>", "<<9*2=18>>")
    first = load_examples("gsm8k-nl:test", "train", config).examples[0]
    assert first.steps[0] == "Janet sells 16 - 3 - 4 = 9 duck eggs a day."
    assert len(first.steps) == 2
    assert load_examples("mult-4:test", "train", config).examples[0].steps[0].startswith("7 6 9 2 0 + 0 2 0 8 7 1 (")
    assert sum(e.metadata["unchanged_from_gsm8k"] for e in load_examples("gsm-hard", "test", config).examples) == 329
    assert not any(e.metadata["in_multiarith"] for e in load_examples("aggregate", "train", config).examples)


@pytest.mark.slow
def test_load_examples_union(root: str) -> None:
    read = load_training_examples(
        build_config(name="gsm-union", data_dir=root, valid="gsm8k-aug:valid", test="gsm8k:test")
    )
    assert len(read.examples) == 10432 + 6973 - 201 + 1384
    assert read.notes == ("gsm8k: 201 rows dropped because their questions are in an earlier set",)
    assert len({e.id for e in read.examples}) == len(read.examples)
    two = load_training_examples(build_config(name=("gsm8k-aug-subset", "gsm8k"), data_dir=root))
    assert two.examples == read.examples[:17204]


def test_load_training_examples_max_rows(root: str) -> None:
    assert (
        len(
            load_training_examples(
                build_config(name=("aggregate", "aggregate:train"), data_dir=root, max_train_rows=5)
            ).examples
        )
        == 5
    )
    assert len(load_held_out(build_config(data_dir=root, valid="gsm8k-aug:valid"), "valid", 3).examples) == 3
    with pytest.raises(InputError, match=r"data\.test is not set"):
        load_held_out(build_config(data_dir=root), "test")


def test_load_examples_refuses_partial_files(root: str) -> None:
    with pytest.raises(InputError, match="name gsm8k-aug-subset") as caught:
        load_examples("gsm8k-aug", "train", build_config(data_dir=root))
    assert "train-subset.jsonl is only a part" in str(caught.value)
    read = load_examples("gsm8k-aug", "train", build_config(data_dir=root, size_check="off"), 3)
    assert read.notes == ("gsm8k-aug:train: 10,432 of 385,620 published rows",)
    assert len(read.examples) == 3


def test_load_examples_checks_sha256(root: str, tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    file = tmp_path / "gsm8k/test.jsonl"
    config = build_config(data_dir=str(tmp_path))
    with pytest.raises(InputError, match=r"^gsm8k:test: no file .*test\.jsonl; data\.data_dir"):
        load_examples("gsm8k", "test", config)
    shutil.copyfile(Path(root) / "gsm8k/test.jsonl", file)
    file.chmod(0o644)
    text = file.read_text("utf-8")
    file.write_text(text.replace("Janet", "Janette", 1), encoding="utf-8")
    with pytest.raises(InputError, match=r"differs from the published file; copy it"):
        load_examples("gsm8k", "test", config)
    file.write_text(text[: text.index("\n") + 1], encoding="utf-8")
    with pytest.raises(InputError, match=r"^gsm8k:test: 1 rows, expected 1,319"):
        load_examples("gsm8k", "test", config)
    assert len(load_examples("gsm8k", "test", build_config(data_dir=str(tmp_path), size_check="off")).examples) == 1


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ("gsm8k-agu", r"gsm8k-agu; did you mean gsm8k-aug\?$"),
        ("svamp", r"^svamp has no split train; it has test$"),
        (
            "mult-4",
            r"^mult-4 has no split train; it has valid, test; generate training rows with `laconic data make mult-4`$",
        ),
        ("gsm8k:tset", r"^gsm8k has no split tset; it has train, valid, test$"),
        ("aggregate", r"^aggregate:train is not on the Hub; set data\.data_dir"),
        ("none.jsonl", r"^no file none\.jsonl"),
    ],
)
def test_load_examples_refuses_unknown_names(queries: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_examples(queries, "train", build_config())


def test_load_training_examples_refuses_chain_field() -> None:
    with pytest.raises(InputError, match=r"data\.chain_field cot"):
        load_training_examples(build_config(chain_field="cot"))


@pytest.mark.medium
def test_load_examples_hub_equals_files(hub: Hub, root: str) -> None:
    folder = Path(root)
    hub({
        ("openai/gsm8k", "train"): published(
            folder / "gsm8k/train.jsonl", lambda row: {"question": row["question"], "answer": row["raw_answer"]}
        )[:600],
        ("openai/gsm8k", "test"): published(
            folder / "gsm8k/test.jsonl", lambda row: {"question": row["question"], "answer": row["raw_answer"]}
        ),
        ("whynlp/gsm8k-aug", "validation"): published(
            folder / "gsm8k-aug/valid.jsonl", lambda row: {key: row[key] for key in ("question", "steps", "answer")}
        ),
        ("juyoung-trl/gsm-hard", "train"): published(
            folder / "gsm-hard/test.jsonl", lambda row: {"instruction": row["question"], "response": row["target"]}
        ),
    })  # fmt: skip
    split = {"train": 0, "valid": 0}
    for part in split:  # the hub has no marks: what GSM8K-Aug validates on is found by its questions
        theirs = texts(load_examples(f"gsm8k:{part}", "train", build_config(size_check="off")))
        assert theirs == texts(load_examples(f"gsm8k:{part}", "train", build_config(data_dir=root)))[: len(theirs)]
        split[part] = len(theirs)
    assert sum(split.values()) == 600
    assert split["valid"] > 20
    for name in ("gsm8k-nl:test", "gsm8k-aug:valid"):
        assert texts(load_examples(name, "train", build_config())) == texts(
            load_examples(name, "train", build_config(data_dir=root))
        ), name
    theirs, ours = (load_examples("gsm-hard", "test", build_config(data_dir=place)) for place in (None, root))
    assert [e.answer for e in theirs.examples] == [e.answer for e in ours.examples]
    mark = "unchanged_from_gsm8k"
    assert [e.metadata[mark] for e in theirs.examples] == [e.metadata[mark] for e in ours.examples]


def test_load_examples_converts_hub_columns(hub: Hub) -> None:
    chain = {"question": "2 and 2?", "cot": "<<2+2=4>> <<4*1=4>>", "answer": "#### 4"}
    hub({
        ("whynlp/gsm8k-aug", "train"): [{"question": "2 and 2?", "steps": ["<<2+2=4>>"], "answer": "4"}],
        ("zen-E/GSM8k-Aug", "train"): [chain, chain | {"question": "3?", "answer": None}],
        ("zen-E/GSM8k-Aug-NL", "train"): [chain | {"cot": "He has 2. So 4."}],
        ("ChilleD/SVAMP", "train"): [{"question_concat": f"{i}?", "Answer": "4.0", "Type": "A"} for i in range(700)],
        ("ChilleD/SVAMP", "test"): [{"question_concat": f"{i}!", "Answer": "4.0", "Type": "A"} for i in range(300)],
        ("ChilleD/MultiArith", "test"): [{"question": f"{i}?", "final_ans": "4"} for i in range(180)],
        ("a/b", "dev"): [{"question": "2?", "rationale": "One.\nTwo.", "answer": "2"}],
    })  # fmt: skip
    pinned = build_config(name=("whynlp/gsm8k-aug", "svamp"), size_check="off", revision="abc")
    assert texts(load_examples("whynlp/gsm8k-aug", "train", pinned)) == [("2 and 2?", ("<<2+2=4>>",), "4")]
    assert queries == [("whynlp/gsm8k-aug", None, "abc")]
    zen = load_examples("zen-E/GSM8k-Aug", "train", build_config())
    assert texts(zen) == [("2 and 2?", ("<<2+2=4>>", "<<4*1=4>>"), "4")]
    assert zen.notes == ("zen-E/GSM8k-Aug:train: rows dropped because they have no answer",)
    assert queries[-1] == ("zen-E/GSM8k-Aug", None, None)  # the revision is of what is trained on
    assert load_examples("zen-E/GSM8k-Aug-NL", "train", build_config()).examples[0].steps == ("He has 2", "So 4")
    assert len(load_examples("svamp", "test", build_config()).examples) == 1000
    assert texts(load_examples("ChilleD/SVAMP", "test", build_config()))[7] == ("7!", (), "4")
    assert len(load_examples("multiarith-180", "test", build_config()).examples) == 180
    assert load_examples("a/b:dev", "train", build_config(chain_field="rationale")).examples[0].steps == (
        "One.",
        "Two.",
    )


def test_load_examples_checks_hub_sizes(hub: Hub) -> None:
    hub({("whynlp/gsm8k-aug", "train"): [{"question": "2?", "steps": [], "answer": "2"}]})
    with pytest.raises(InputError, match=r"^gsm8k-aug:train: 1 rows, expected 385,620"):
        load_training_examples(build_config(name="whynlp/gsm8k-aug"))
    read = load_training_examples(build_config(name="whynlp/gsm8k-aug", size_check="off"))
    assert read.notes == ("gsm8k-aug:train: 1 of 385,620 published rows",)


def test_load_examples_locates_invalid_hub_rows(hub: Hub) -> None:
    hub(
        {
            ("a/b", "train"): [
                {"question": "2?", "steps": [], "answer": "2"},
                {"question": "", "steps": [], "answer": "2"},
            ]
        }
    )
    with pytest.raises(InputError, match=r"^a/b:train:2: question: empty: "):
        load_training_examples(build_config(name="a/b"))


def test_get_answer_kind() -> None:
    kinds: Iterable[tuple[Any, str]] = [("gsm8k", "number"), (("gsm8k", "prosqa"), "text"), ("mult-4:valid", "digits")]
    for name, kind in kinds:
        assert get_answer_kind(build_config(name=name)) == kind
