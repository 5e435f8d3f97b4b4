"""Tokenizers and chat templates against transformers; hostile templates against the limits."""

import hashlib
import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import laconic
from laconic.data import chat_template
from laconic.data.tokenizer import build_byte_tokenizer, load_tokenizer
from laconic.errors import InputError, UnsafeFileError, UsageError
from tests.conftest import needs, shared_dir

TEXTS = ["Once upon a time", "", " a  b\n\n\tc", "it's naïve: 日本 😀", "hello<|endoftext|> world</s> <s>x", "x" * 700]
CORPUS = ["hello world, the cat sat on the mat. It's 3 o'clock\n\n  naïve 日本 " * 20]
REAL_CONFIGS = Path(__file__).parents[1] / "real_configs" / "supported"
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {"tokenizer_class": "GPT2Tokenizer"},
    "gpt2, as the hub has it": {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
        "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True, "normalized": True}},
    },
    "opt": {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>"),
        "pad_token": "<pad>",
    },
}


@pytest.fixture
def stories() -> Path:
    return shared_dir() / "models" / "stories260k"


def byte_level(folder: Path, settings: dict[str, Any]) -> Path:
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=330, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return folder


def compare(folder: Path) -> None:
    needs("transformers")
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id) == (
        len(theirs),
        theirs.bos_token_id,
        theirs.eos_token_id,
    )


def test_load_tokenizer_from_tokenizer_json(stories: Path) -> None:
    compare(stories)
    ours = laconic.load_tokenizer(stories)
    assert ours.encode("Once upon a time")[0] == ours.bos_token_id == 1
    assert ours.eos_token_id == 2
    assert ours.vocab_size == 512
    assert ours.fingerprint == hashlib.sha256((stories / "tokenizer.json").read_bytes()).hexdigest()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_load_tokenizer_from_vocab_and_merges(settings: dict[str, Any], tmp_path: Path) -> None:
    compare(byte_level(tmp_path, settings))
    files = (tmp_path / "vocab.json").read_bytes() + (tmp_path / "merges.txt").read_bytes()
    assert load_tokenizer(tmp_path).fingerprint == hashlib.sha256(files).hexdigest()


def test_load_tokenizer_from_vocab_and_merges_alone(tmp_path: Path) -> None:
    byte_level(tmp_path, {})
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).encode("<|endoftext|>") == [0]
    assert load_tokenizer(tmp_path).eos_token_id == 0


def test_load_tokenizer_ignores_null_special_tokens(tmp_path: Path) -> None:
    byte_level(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "a"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == tokenizer.encode("a", add_special_tokens=False)[0]


def test_load_tokenizer_template_not_utf8(stories: Path, tmp_path: Path) -> None:
    shutil.copytree(stories, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(InputError, match=r"chat_template.jinja: not UTF-8 at byte 2"):
        load_tokenizer(tmp_path / "model")


def test_encode_of_several_texts_names_the_call_for_them(stories: Path) -> None:
    texts: Any = ["a", "b"]
    with pytest.raises(UsageError, match="not list; call the tokenizer"):
        load_tokenizer(stories).encode(texts)
    for encode in (load_tokenizer(stories).encode, load_tokenizer(stories)):
        with pytest.raises(InputError, match="without surrogates; remove the characters"):
            encode("a\ud800")


def test_decode_of_one_id_and_of_what_is_none(stories: Path) -> None:
    tokenizer = load_tokenizer(stories)
    ids: tuple[Any, ...] = (300, np.int64(300), torch.tensor(300), torch.tensor([300]))
    assert {tokenizer.decode(id) for id in ids} == {tokenizer.decode([300])}
    others: tuple[Any, ...] = ([[300]], [-1], 2**40, 3.0, "text", None)
    for other in others:
        with pytest.raises(UsageError, match="decode takes the ids of one text"):
            tokenizer.decode(other)


def test_encode_neither_truncates_nor_pads(stories: Path, tmp_path: Path) -> None:
    source = json.loads((stories / "tokenizer.json").read_text(encoding="utf-8"))
    source["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    source["padding"] = {
        "strategy": {"Fixed": 30}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<unk>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    text = "Once upon a time there was"
    assert load_tokenizer(tmp_path).encode(text) == load_tokenizer(stories).encode(text)


def test_load_tokenizer_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither tokenizer\.json nor vocab.json"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_invalid_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"^tokenizer\.json: invalid tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"a": }')
    with pytest.raises(InputError, match=rf"^{tmp_path}/tokenizer_config\.json:1:7: not JSON"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_refuses_links_out_of_the_folder(stories: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_bytes((stories / "tokenizer.json").read_bytes())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").symlink_to("../other.json")
    with pytest.raises(UnsafeFileError, match="leads out of its folder"):
        load_tokenizer(tmp_path / "model")


# --- chat

PLAIN = """{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}
        {{- bos_token + '<|system|>be brief' + eos_token }}
    {%- endif %}
<|{{ m['role'] }}|>
{{ m.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
RICH = """{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}
{% set ns.n = ns.n + 1 %}  {{ ns.n }}: {{ m | tojson }} {{ [1, 2] | tojson(indent=2) }}
{% if m.role == 'assistant' %}{% generation %}{% set y = 1 %}{{ m.role }}{{ eos_token }}{% endgeneration %}
{% endif %}
{{ y is defined }}
{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}{{ tools is none }}{{ strftime_now('%Y') }}"""
TALK = [
    {"role": "user", "content": " What is <b> & naïve 日本? "},
    {"role": "assistant", "content": "This."},
    {"role": "tool", "content": "skipped"},
    {"role": "user", "content": "'quoted' \"text\""},
]


def folder_of(stories: Path, tmp_path: Path, chat: Any, jinja: str | None = None) -> Path:
    shutil.copy(stories / "tokenizer.json", tmp_path)
    config = json.loads((stories / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | ({"chat_template": chat} if chat else {})))
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("text", [PLAIN, RICH], ids=["plain", "rich"])
def test_apply_chat_template_equals_transformers(text: str, answer: bool, stories: Path, tmp_path: Path) -> None:
    needs("transformers")
    from transformers import AutoTokenizer

    folder = folder_of(stories, tmp_path, text)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TALK, tokenize=False, add_generation_prompt=answer
    )
    assert load_tokenizer(folder).apply_chat_template(TALK, add_generation_prompt=answer) == expected


def test_read_chat_template_sources(stories: Path, tmp_path: Path) -> None:
    say = "{{ messages[0].content }}"
    assert load_tokenizer(folder_of(stories, tmp_path, say + "1")).apply_chat_template(TALK[1:]) == "This.1"
    named = [{"name": "tool_use", "template": say + "2"}, {"name": "default", "template": say + "3"}]
    assert load_tokenizer(folder_of(stories, tmp_path, named)).apply_chat_template(TALK[1:]) == "This.3"
    by_name = {entry["name"]: entry["template"] for entry in named}
    assert load_tokenizer(folder_of(stories, tmp_path, by_name)).apply_chat_template(TALK[1:]) == "This.3"
    assert load_tokenizer(folder_of(stories, tmp_path, named, say + "4")).apply_chat_template(TALK[1:]) == "This.4"


def test_apply_chat_template_without_template(stories: Path) -> None:
    with pytest.raises(InputError, match=r"no chat template .* give plain text"):
        load_tokenizer(stories).apply_chat_template(TALK)
    messages: Any
    for messages in ("hi", TALK[0], None, ["hi"]):
        with pytest.raises(UsageError, match="messages: give a list of messages such as"):
            load_tokenizer(stories).apply_chat_template(messages)


def test_render_chat_template_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on CPU time: a thread that waits for its turn is not stopped."""
    monkeypatch.setattr(chat_template.time, "monotonic", count(0, 60).__next__)
    variables = {"messages": TALK, "bos_token": ""}
    assert chat_template.render_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}", variables)


HOSTILE_TEMPLATES: dict[str, tuple[type[Exception], str]] = {
    text: (kind, message)
    for text, kind, message in [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            UnsafeFileError,
            "took more than 1 s",
        ),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", InputError, "RecursionError"),
        (
            "{% for i in range(99999) %}{{ 'a' * 100 }}{% endfor %}",
            UnsafeFileError,
            "more than 1,000,000 characters",
        ),
        ("{{ 'é' * 600000 + 'é' * 600000 }}", UnsafeFileError, "more than 1,000,000 characters"),
        ("{{ 'a'.ljust(10 ** 9) }}", UnsafeFileError, "number over 1,000,000"),
        ("{{ 'a' | center(999999999) }}", UnsafeFileError, "number over 1,000,000"),
        ("{{ '%999999999d' % 3 }}", UnsafeFileError, "wide field"),
        ("{% set x = 'a' * 1000 %}" + "{% set x = x ~ x %}" * 40, UnsafeFileError, "more than 1,000,000 characters"),
        ("{{ 'a' * 2000000000 }}", UnsafeFileError, "1,000,000 items"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", UnsafeFileError, "SecurityError"),
        ("{{ messages.append(1) }}", UnsafeFileError, "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", UnsafeFileError, "SecurityError"),
        ("{% include '/etc/passwd' %}", InputError, "no loader"),
        (
            "{{ raise_exception('roles must alternate') }}",
            InputError,
            "TemplateError: the template rejects the messages: roles must alternate",
        ),
        ("{% for", InputError, "TemplateSyntaxError"),
    ]
}


@pytest.mark.medium
@pytest.mark.parametrize("text", HOSTILE_TEMPLATES)
def test_render_chat_template_limits(text: str, stories: Path, tmp_path: Path) -> None:
    kind, message = HOSTILE_TEMPLATES[text]
    tokenizer = load_tokenizer(folder_of(stories, tmp_path, text))
    with pytest.raises(kind, match=r"^chat template: ") as caught:
        tokenizer.apply_chat_template(TALK)
    assert message in str(caught.value)


def test_load_tokenizer_with_large_integers_in_its_config(stories: Path, tmp_path: Path) -> None:
    shutil.copy(stories / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert load_tokenizer(tmp_path).encode("Once") == load_tokenizer(stories).encode("Once")


@pytest.mark.parametrize("text", [*TEXTS, "".join(map(chr, range(256)))])
def test_build_byte_tokenizer(text: str, tmp_path: Path) -> None:
    byte_tokenizer = build_byte_tokenizer()
    assert byte_tokenizer.encode(text) == list(text.encode())
    assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text
    assert (byte_tokenizer.eos_token_id, byte_tokenizer.bos_token_id, byte_tokenizer.vocab_size) == (256, None, 257)
    byte_tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == byte_tokenizer.fingerprint


def test_load_tokenizer_adds_tokens_named_beside_the_vocabulary(tmp_path: Path) -> None:
    """As in older checkpoints, where special_tokens_map.json takes precedence over tokenizer_config.json."""
    needs("transformers")
    from transformers import TokenizersBackend

    shutil.copytree(REAL_CONFIGS / "meta-llama--Llama-2-7b-hf", tmp_path, dirs_exist_ok=True)
    size = load_tokenizer(tmp_path).vocab_size
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "[PAD]"}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": size + 1, "[PAD]": size}))
    ours, theirs = load_tokenizer(tmp_path), TokenizersBackend.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs) == size + 3
    assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id) == (size + 2, size)
    assert ours.encode("a [PAD]<tool> b<end>") == theirs.encode("a [PAD]<tool> b<end>")
    ids = [size, size + 1, size + 2]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "<tool>"


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.json": {"chat_template": "A"}},
        {
            "tokenizer_config.json": {
                "chat_template": [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]
            }
        },
        {"chat_template.json": {"chat_template": "B"}, "tokenizer_config.json": {"chat_template": "A"}},
        {"chat_template.jinja": "A", "tokenizer_config.json": {"chat_template": "B"}},
    ],
    ids=["chat_template.json", "list", "tokenizer_config.json", "chat_template.jinja"],
)
def test_read_chat_template_takes_the_first_of(files: dict[str, Any], stories: Path, tmp_path: Path) -> None:
    shutil.copy(stories / "tokenizer.json", tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "x"}]) == "A"


def test_apply_chat_template_takes_the_one_for_tools(stories: Path, tmp_path: Path) -> None:
    """Beside chat_template.jinja, in a folder as transformers 5 writes it; other places are in the corpus."""
    shutil.copy(stories / "tokenizer.json", tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "chat_template.jinja").write_text("default")
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("{{ tools[0].name }}")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template(TALK) == "default"
    assert tokenizer.apply_chat_template(TALK, tools=[{"name": "add"}]) == "add"
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.apply_chat_template(TALK, tools=[{"name": "add"}]) == "add"
    assert (again.files, again.fingerprint) == (tokenizer.files, tokenizer.fingerprint)
    (tmp_path / "saved/additional_chat_templates/tool_use.jinja").unlink()
    (tmp_path / "saved/additional_chat_templates/tool_use.jinja").symlink_to("/etc/hostname")
    with pytest.raises(UnsafeFileError, match="leads out of its folder"):
        load_tokenizer(tmp_path / "saved")


def test_load_tokenizer_with_a_sentencepiece_model_only(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(InputError, match=r"write tokenizer\.json once with transformers"):
        load_tokenizer(tmp_path)


def test_tokenizer_repr_and_batch() -> None:
    tokenizer = build_byte_tokenizer()
    assert repr(tokenizer) == "Tokenizer(257 tokens, eos_token='<eos>', without chat template)"
    input_ids, attention_mask = tokenizer(["ab", "", "c"])
    assert input_ids.tolist() == [[97, 98], [256, 256], [256, 99]]
    assert attention_mask.tolist() == [[True, True], [False, False], [False, True]]
    assert tokenizer("ab").input_ids.tolist() == [[97, 98]]
    assert tokenizer([]).input_ids.shape == (0, 0)
    assert tokenizer.decode([97, 256]) == "a"
    assert tokenizer.decode([97, 256], skip_special_tokens=False) == "a<eos>"
