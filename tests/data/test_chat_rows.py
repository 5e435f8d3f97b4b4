"""Rows of messages and of prompt and completion: their parts, and their ids as in transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.batches import IGNORE_INDEX
from laconic.config.data import DataConfig
from laconic.data.audit import audit_examples, scan_file
from laconic.data.reasoning.dataset import ReasoningDataset
from laconic.data.reasoning.read_examples import read_examples
from laconic.data.tokenizer import Tokenizer, build_byte_tokenizer, load_tokenizer
from laconic.errors import InputError
from tests.conftest import needs, shared_dir
from tests.encoding import encode_example

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER, REPLY = {"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "It is 7."}
SYSTEM = {"role": "system", "content": "Be brief."}
THINKING = REPLY | {"content": "<think>\n3 + 4 = 7\nDone.\n</think>\n\nIt is 7."}


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with GPT-2's tokenizer, ChatML's two special tokens and template."""
    source, folder = shared_dir() / "data/tokenizers/gsm-bpe-2048", tmp_path_factory.mktemp("chatml")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    first = max(token["id"] for token in tokenizer["added_tokens"]) + len(tokenizer["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [
        {"id": first + i, "content": text, **flags} for i, text in enumerate(("<|im_start|>", "<|im_end|>"))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(chatml: Path) -> Tokenizer:
    return load_tokenizer(chatml)


def read(tmp_path: Path, *rows: dict[str, Any], **values: Any) -> Any:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_examples(file, DataConfig(path=str(file), **values)).examples


def test_read_examples_messages(tmp_path: Path) -> None:
    rows = read(tmp_path, {"messages": [SYSTEM, USER, THINKING]}, {"messages": [USER, REPLY, USER, REPLY]})
    assert [row.question for row in rows] == ["What is 3 + 4?"] * 2
    assert [row.answer for row in rows] == ["It is 7."] * 2
    assert [row.steps for row in rows] == [("3 + 4 = 7", "Done."), ()]
    assert [len(row.metadata["messages"]) for row in rows] == [2, 3]
    reply = REPLY | {"reasoning_content": "3 + 4 = 7"}
    assert read(tmp_path, {"messages": [USER, reply]})[0].steps == ("3 + 4 = 7",)


def test_read_examples_prompt_and_completion(tmp_path: Path) -> None:
    rows = read(tmp_path, {"prompt": "3 + 4 =", "completion": " 7"})
    assert (rows[0].question, rows[0].answer) == ("3 + 4 =", " 7")
    rows = read(tmp_path, {"prompt": [SYSTEM, USER], "completion": [REPLY]})
    assert (rows[0].question, rows[0].answer) == ("What is 3 + 4?", "It is 7.")


CHAIN, TEXT = ("3 + 4 = 7", "Done."), "3 + 4 = 7\nDone."
FORMS: list[dict[str, Any]] = [
    {"messages": [USER, REPLY]},
    {"conversations": [USER, REPLY]},
    {"prompt": "What is 3 + 4?", "completion": "It is 7."},
    {"instruction": "What is 3 + 4?", "output": "It is 7."},
    {"question": "What is 3 + 4?", "answer": "It is 7."},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_read_examples_reads_the_chain_of_every_form(tmp_path: Path, form: dict[str, Any]) -> None:
    """A field for chains, or the thinking at the beginning of the answer; never dropped in silence."""
    thinking = json.loads(json.dumps(form).replace('"It is 7."', json.dumps(THINKING["content"])))
    for row in (form | {"steps": list(CHAIN)}, form | {"cot": TEXT}, form | {"rationale": TEXT}, thinking):
        (example,) = read(tmp_path, row)
        assert (example.question, example.steps, example.answer) == ("What is 3 + 4?", CHAIN, "It is 7.")
    for first in (None, ""):  # as in Parquet, where a row without a chain has null
        examples = read(tmp_path, form | {"cot": first}, form | {"cot": TEXT})
        assert [example.steps for example in examples] == [(), CHAIN]
    with pytest.raises(InputError, match=r"cot: a chain, and another one is <think> in the answer: .*; keep one"):
        read(tmp_path, thinking | {"cot": "Another."})


@pytest.mark.parametrize("form", FORMS[:4], ids=lambda form: next(iter(form)))
def test_read_examples_of_two_forms(tmp_path: Path, form: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^rows\.jsonl:2: no field question"):
        read(tmp_path, FORMS[-1], form)
    assert read(tmp_path, form | {"steps": 5})[0].steps == ()  # a number of steps is no chain
    with pytest.raises(InputError, match=r":2: no field steps: .*; give all rows the field cot"):
        read(tmp_path, form, form | {"cot": TEXT})


MARKS = {
    "DeepSeek": "3 + 4 = 7\nDone.\n</think>\n\nIt is 7.",
    "OpenThoughts": "<|begin_of_thought|>\n\n3 + 4 = 7\nDone.\n\n<|end_of_thought|>\n\n"
    "<|begin_of_solution|>\n\nIt is 7.\n\n<|end_of_solution|>",
}


def test_read_examples_reads_the_marks_of_a_chain_field(tmp_path: Path) -> None:
    """OpenMathReasoning repeats the answer after the thinking."""
    (example,) = read(tmp_path, {"question": "What is 3 + 4?", "answer": "7", "cot": THINKING["content"]})
    assert example.steps == CHAIN
    (example,) = read(tmp_path, {"prompt": [USER], "completion": THINKING["content"]})
    assert (example.question, example.steps, example.answer) == ("What is 3 + 4?", CHAIN, "It is 7.")


@pytest.mark.parametrize("mark", MARKS)
def test_read_examples_reads_other_marks_of_thinking(tmp_path: Path, mark: str) -> None:
    (example,) = read(tmp_path, {"question": "What is 3 + 4?", "answer": MARKS[mark]})
    assert (example.steps, example.answer) == (CHAIN, "It is 7.")
    for key in ("reasoning", "thinking"):
        (example,) = read(tmp_path, {"messages": [USER, REPLY | {key: TEXT}]})
        assert (example.steps, example.answer) == (CHAIN, "It is 7.")


def test_read_examples_leaves_the_reply_out_of_the_question(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """OpenR1's rows have a question and an answer, and messages with the reply."""
    row = {"question": USER["content"], "answer": "7", "messages": [USER, THINKING]}
    (tmp_path / "0.jsonl").write_text(json.dumps(row) + "\n")
    result = read_examples(tmp_path / "0.jsonl", DataConfig(path="0.jsonl", format="chat"))
    assert "messages" not in result.examples[0].metadata
    assert result.notes == (
        "0.jsonl: messages: not read beside a question and an answer; remove answer, so that they are read",
    )
    encoded = encode_example(result.examples[0], tokenizer, DataConfig(path="x", format="chat", answer_type="text"))
    assert "Done." not in tokenizer.decode(encoded.question_ids)


@pytest.mark.parametrize("messages", [[USER], [REPLY], [USER, {"role": "assistant", "content": None}], "text", [1]])
def test_read_examples_refuses_other_messages(tmp_path: Path, messages: Any) -> None:
    with pytest.raises(InputError, match=r"^rows\.jsonl:1: messages: (expected|message 1 has no role|the content of)"):
        read(tmp_path, {"messages": messages})


def test_read_examples_messages_as_the_server_accepts_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 + 4?"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "3 4"}}]}
    result = {"role": "tool", "content": "7"}
    reply = REPLY | {"tool_calls": None}  # as in Parquet, where every message has every key
    (row,) = read(tmp_path, {"messages": [USER | {"content": parts}, call, result, reply]}, format="chat")
    assert (row.question, row.answer) == ("What is 3 + 4?", "It is 7.")
    assert [message["content"] for message in row.metadata["messages"]] == ["What is 3 + 4?", "", "7"]
    assert row.metadata["messages"][1]["tool_calls"] == call["tool_calls"]
    for last in (call, reply | {"tool_calls": call["tool_calls"]}):
        with pytest.raises(
            InputError, match=r":1: messages: the last one has tool_calls, .*; end the row with a reply"
        ):
            read(tmp_path, {"messages": [USER, last]})


def test_read_examples_sharegpt_conversations(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "What is 3 + 4?"}, {"from": "gpt", "value": THINKING["content"]}]
    for row in ({"conversations": [{"from": "system", "value": "Be brief."}, *turns]},
                {"conversations": turns, "system": "Be brief."},
                {"conversations": [{**turn, "role": None} for turn in turns], "system": "Be brief."},
                {"conversations": [{"from": turn["role"], "value": turn["content"]} for turn in (USER, THINKING)],
                 "system": "Be brief."},
                {"conversations": [turns[0], turns[1] | {"from": "chatgpt"}], "system": "Be brief."},
                {"conversation": [SYSTEM, USER, THINKING], "system": "Be brief."}):  # fmt: skip
        (example,) = read(tmp_path, row, format="chat")
        assert (example.question, example.steps) == ("What is 3 + 4?", ("3 + 4 = 7", "Done."))
        assert (example.answer, example.metadata) == ("It is 7.", {"messages": [SYSTEM, USER]})
    for conversations in ([*turns, {"from": "critic", "value": "7"}], "text", [{"value": "7"}]):
        with pytest.raises(InputError, match="conversations: expected turns from human, gpt, system or tool"):
            read(tmp_path, {"conversations": conversations})
    call = [{"from": "function_call", "value": "{}"}, {"from": "observation", "value": "7"}]
    (example,) = read(tmp_path, {"conversations": [turns[0], *call, turns[1]]}, format="chat")
    assert [message["role"] for message in example.metadata["messages"]] == ["user", "assistant", "tool"]


def test_read_examples_sharegpt_leaves_out_turns_without_an_answer(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "3+4?"}, {"from": "gpt", "value": "7"}, {"from": "human", "value": "Thanks!"}]
    for system in ({}, {"system": "Be brief."}):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"conversations": turns, **system}) + "\n")
        file = read_examples(path, DataConfig(path=str(path), format="chat"))
        assert (file.examples[0].question, file.examples[0].answer) == ("3+4?", "7")
    with pytest.raises(InputError, match="messages that end with the assistant's"):
        read(tmp_path, {"conversations": turns[:1]})
    with pytest.raises(InputError, match="a question before the assistant's answer"):
        read(tmp_path, {"conversations": turns[1:]})


@pytest.mark.parametrize("messages", [[SYSTEM, USER, REPLY], [USER, REPLY, USER, REPLY]])
def test_reasoning_dataset_refuses_history_without_chat_format(
    tmp_path: Path, tokenizer: Tokenizer, messages: Any
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [USER, REPLY]}) + "\n" + json.dumps({"messages": messages}) + "\n")
    config = DataConfig(path="rows.jsonl", on_invalid_row="skip")
    scanned = scan_file(file)
    with pytest.raises(InputError) as caught:
        ReasoningDataset(scanned.examples, tokenizer, config)
    assert str(caught.value) == 'row rows.jsonl:2: a conversation of several messages; set data.format = "chat"'
    assert len(ReasoningDataset(scanned.examples[:1], tokenizer, config)) == 1
    assert len(ReasoningDataset(scanned.examples, tokenizer, config.model_copy(update={"format": "chat"}))) == 2
    audit = audit_examples(scanned, tokenizer, None, lambda *_: None)
    prompt = tokenizer.apply_chat_template(messages[:-1])
    assert audit.problems == []
    assert audit_examples(scanned, build_byte_tokenizer(), None, lambda *_: None).problems == []
    empty = {"messages": [{"role": "system", "content": " "}, USER, REPLY]}
    assert len(ReasoningDataset(read(tmp_path, empty), tokenizer, config)) == 1
    assert audit.tokens["question"]["maximum"] == len(tokenizer.encode(prompt, add_special_tokens=False))


@pytest.mark.parametrize("messages", [[USER, REPLY], [SYSTEM, USER, REPLY, USER, REPLY]])
def test_encode_example_chat_equals_transformers(
    tmp_path: Path, chatml: Path, tokenizer: Tokenizer, messages: Any
) -> None:
    needs("transformers")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(chatml)
    (example,) = read(tmp_path, {"messages": messages})
    config = DataConfig(path="rows.jsonl", format="chat", answer_type="text", chain_steps="all")
    row = encode_example(example, tokenizer, config)
    prompt = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    assert list(row.question_ids) == prompt
    whole = theirs.apply_chat_template(messages, return_dict=False)
    newline = theirs.encode("\n", add_special_tokens=False)
    assert [*row.question_ids, *row.chain_ids, *row.answer_ids, *newline] == whole
    assert row.answer_ids[-1] == theirs.eos_token_id


def test_encode_example_chat_needs_a_template(tmp_path: Path) -> None:
    rows = read(tmp_path, {"messages": [USER, REPLY]}, {"messages": [USER, THINKING]})
    with pytest.raises(InputError, match=r'^data\.format "chat": the model has no chat template; [^\n]*$'):
        ReasoningDataset(rows, build_byte_tokenizer(), DataConfig(path="rows.jsonl", format="chat"), max_positions=99)


QWEN = Path(__file__).parents[1] / "real_configs/supported/Qwen--Qwen2.5-0.5B-Instruct"
CHAT = DataConfig(path="rows.jsonl", format="chat", answer_type="text")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("form", ["list", "text", "texts"])
def test_encode_example_chat_tools_equal_transformers(form: str, tmp_path: Path) -> None:
    """Data sets hold a list of tools, its JSON text, or a list of JSON texts."""
    needs("transformers")
    from transformers import AutoTokenizer

    tools: Any = {"list": TOOLS, "text": json.dumps(TOOLS), "texts": list(map(json.dumps, TOOLS))}[form]
    row = {"messages": [USER, REPLY], "tools": tools}
    (example,) = read(tmp_path, row, format="chat")
    tokenizer = load_tokenizer(QWEN)
    ours = encode_example(example, tokenizer, CHAT)
    theirs = AutoTokenizer.from_pretrained(QWEN)
    prompt = theirs.apply_chat_template([USER], tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert list(ours.question_ids) == prompt
    assert '"add"' in tokenizer.decode(prompt)


def test_encode_example_chat_tools_of_parquet_have_no_keys_of_other_rows(tmp_path: Path) -> None:
    """In Parquet, every object has the keys of all others, with null."""
    needs("pyarrow")
    import pyarrow
    import pyarrow.parquet

    names = ("x", "y")
    tools = [{"type": "function", "function": {"name": "f", "properties": {name: {"type": "int"}}}} for name in names]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {name: 1}}} for name in names]
    messages = [[USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER] for call in calls]
    rows = [{"messages": [*m, REPLY], "tools": [tool]} for m, tool in zip(messages, tools, strict=True)]
    table, file = pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, file)
    examples = read_examples(file, DataConfig(path=str(file), format="chat")).examples
    assert examples[0].metadata["tools"][0]["function"]["properties"] == {"x": {"type": "int"}, "y": None}
    tokenizer = load_tokenizer(QWEN)
    for example, m, tool in zip(examples, messages, tools, strict=True):
        assert example.metadata["messages"] == m
        prompt = tokenizer.apply_chat_template(m, tools=[tool])
        assert tokenizer.decode(list(encode_example(example, tokenizer, CHAT).question_ids), False) == prompt


@pytest.mark.parametrize("tools", ["text", [1], 3])
def test_tools_that_are_no_schemas_are_refused_where_they_are_read(tools: Any, tmp_path: Path) -> None:
    (example,) = read(tmp_path, {"messages": [USER, REPLY], "tools": tools}, format="codi")
    with pytest.raises(InputError, match="tools: expected a list of JSON schemas, or its JSON text: "):
        encode_example(example, load_tokenizer(QWEN), CHAT)


@pytest.mark.parametrize("tools", [None, [], "", " ", "[]", "null"])
def test_tools_may_be_empty(tools: Any, tmp_path: Path, tokenizer: Tokenizer) -> None:
    (example,) = read(tmp_path, {"messages": [USER, REPLY], "tools": tools})
    (plain,) = read(tmp_path, {"messages": [USER, REPLY]})
    ours, expected = (encode_example(e, tokenizer, CHAT) for e in (example, plain))
    assert ours.question_ids == expected.question_ids


@pytest.mark.parametrize(
    "row",
    [
        {"question": "3 + 4?", "answer": "7"},
        {"prompt": "3 + 4?", "completion": "7"},
        {"instruction": "3 + 4?", "output": "7"},
    ],
)
def test_tools_of_rows_without_messages_are_another_field(
    row: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (example,) = read(tmp_path, row | {"tools": "calculator"}, format="chat")
    (plain,) = read(tmp_path, row, format="chat")
    ours, expected = (encode_example(e, tokenizer, CHAT) for e in (example, plain))
    assert ours.question_ids == expected.question_ids


def test_encode_example_chat_with_chain_and_number(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (example,) = read(tmp_path, {"question": "3 + 4 - 2 =", "steps": ["3 + 4 = 7", "7 - 2 = 5"], "answer": "5"})
    row = encode_example(example, tokenizer, DataConfig(path="rows.jsonl", format="chat", chain_steps="all"))
    text = tokenizer.backend.decode([*row.question_ids, *row.chain_ids, *row.answer_ids], skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\n3 + 4 - 2 =<|im_end|>\n<|im_start|>assistant\n"
        "3 + 4 = 7\n7 - 2 = 5\nThe answer is: 5<|im_end|>"
    )
    assert tokenizer.decode(row.answer_ids[slice(*row.number_span)]).strip() == "5"
    assert row.distill_column == row.number_span[0] - 1
    assert set(row.chain_step_index) == {0, 1}


def test_reasoning_dataset_scores_the_reply_only(tmp_path: Path, tokenizer: Tokenizer) -> None:
    examples = read(tmp_path, {"messages": [SYSTEM, USER, REPLY]}, {"messages": [USER, THINKING]})
    config = DataConfig(path="rows.jsonl", format="chat", answer_type="text", chain_steps="all")
    batch = ReasoningDataset(examples, tokenizer, config).batch([0, 1], 0, 0)
    first = torch.where(batch.chain_mask[:, :1].any(1), batch.chain_ids[:, 0], batch.answer_ids[:, 0])
    assert batch.question_target.equal(first)
    scored = (batch.answer_targets != IGNORE_INDEX).sum(1)
    assert scored.equal(batch.answer_mask.sum(1) - 1)


def test_encode_example_chat_refuses_special_tokens_and_no_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = DataConfig(path="rows.jsonl", format="chat", answer_type="text", chain_steps="all")
    (example,) = read(tmp_path, {"messages": [USER | {"content": "x<|im_end|>y"}, REPLY]})
    with pytest.raises(InputError, match=r"special token <\|im_end\|>"):
        encode_example(example, tokenizer, config)
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "<|im_end|>"}}}
    hidden = replace(example, metadata={"messages": [USER | {"tool_calls": [call]}]})
    with pytest.raises(InputError, match=r"special token <\|im_end\|>"):
        encode_example(hidden, tokenizer, config)
    plain = load_tokenizer(shared_dir() / "data/tokenizers/gsm-bpe-2048")
    with pytest.raises(InputError, match="no chat template"):
        encode_example(
            read(tmp_path, {"messages": [USER, REPLY]})[0],
            plain,
            config.model_copy(update={"eos_token": "<|endoftext|>"}),
        )
