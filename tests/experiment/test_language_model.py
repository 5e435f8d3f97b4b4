"""`LanguageModel.generate` after a memory: equal to the text, and to `laconic generate --memory`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic import Decoder, DecoderConfig, GenerationConfig, KVCompressionConfig, KVMemory, LanguageModel
from laconic.compression.memory import SummaryMemory
from laconic.data.tokenizer import Tokenizer, build_byte_tokenizer
from laconic.errors import CorruptArtifactError, InputError, UsageError
from tests.conftest import RunCli

pytestmark = pytest.mark.usefixtures("unchecked")
STORY = "Once upon a time, there was a cat named Tom. Tom had a red ball. He lost the ball in the park."
CHECKPOINTS = Path(laconic.__file__).parent / "checkpoints"
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
TEN = GenerationConfig(max_tokens=10)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    model = laconic.load("stories260k")
    assert isinstance(model, LanguageModel)
    return model


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "story.txt"
    path.write_text(STORY)
    return path


@pytest.fixture
def memory(story: Path, tmp_path: Path, run_cli: RunCli) -> Path:
    """The file of a memory of half of the story."""
    path = tmp_path / "story.safetensors"
    assert run_cli("compress", "stories260k", story, "--out", path, "--keep", 0.5).code == 0
    return path


def summary_memory(width: int) -> SummaryMemory:
    segment_ids = torch.zeros(1, 1, dtype=torch.long)
    return SummaryMemory(torch.zeros(1, 1, width), segment_ids == 0, segment_ids, None, segment_ids + 4)


def test_generate_after_a_memory_of_everything_equals_the_text(model: LanguageModel) -> None:
    ids = model.tokenizer.encode(STORY)
    memory = laconic.compress_kv(model.decoder, ids, KVCompressionConfig("window", keep=1.0))
    prompts = [" He was", " The"]
    after = model.generate(prompts, TEN, memory=memory)
    whole = [ids + model.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    texts = laconic.generate(model.decoder, model.tokenizer, input_ids=whole, config=TEN)
    assert [r.text for r in after] == [r.text for r in texts]
    assert model.generate([], TEN, memory=memory) == []


def test_generate_after_a_memory_equals_the_command(model: LanguageModel, memory: Path, run_cli: RunCli) -> None:
    arguments = ("generate", "stories260k", " He was", "--memory", memory, "--max-tokens", 10, "--format", "json")
    expected = json.loads(run_cli(*arguments).out)["generations"][0]
    for source in (memory, str(memory), model.load_memory(memory)):
        (result,) = model.generate(" He was", TEN, memory=source)
        assert (result.text, result.token_ids) == (expected["text"], expected["ids"])
    without = model.generate(" He was", TEN)[0]
    assert without.token_ids != expected["ids"]


def test_generate_after_memories_of_several_texts(model: LanguageModel, memory: Path) -> None:
    one = model.load_memory(memory)
    two = KVMemory.concat_rows(one, one)
    alone = [model.generate(prompt, TEN, memory=one)[0].text for prompt in (" He", " The")]
    assert [result.text for result in model.generate([" He", " The"], TEN, memory=two)] == alone
    assert [result.text for result in model.generate(" He", TEN, memory=two)] == [alone[0]] * 2
    with pytest.raises(UsageError, match="3 prompts for a memory of 2 texts"):
        model.generate(["a", "b", "c"], TEN, memory=two)


def test_generate_joins_memories_as_the_command_does(model: LanguageModel, memory: Path, run_cli: RunCli) -> None:
    flags = ("--memory", memory, "--memory", memory, "--max-tokens", 10, "--format", "json")
    expected = json.loads(run_cli("generate", "stories260k", " He was", *flags).out)["generations"][0]["ids"]
    one = model.load_memory(memory)
    both = KVMemory.concat_documents(model.decoder.config, one, one)
    for sources in ([memory, one], (one, str(memory)), both):
        assert model.generate(" He was", TEN, memory=sources)[0].token_ids == expected


def test_generate_after_a_chat_memory_replies_until_the_turn_ends(story: Path, tmp_path: Path, run_cli: RunCli) -> None:
    folder, path, question = tmp_path / "chat", tmp_path / "chat.safetensors", "Who lost it?"
    shutil.copytree(CHECKPOINTS / "stories260k", folder)
    options = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(options | {"chat_template": TEMPLATE}))
    assert run_cli("compress", folder, story, "--out", path, "--keep", 1, "--chat").code == 0
    model = laconic.load(folder)
    assert isinstance(model, LanguageModel)
    arguments = (f"{STORY}\n\n{question}", "--chat", "--max-tokens", 10, "--format", "json")
    expected = json.loads(run_cli("generate", folder, *arguments).out)["generations"][0]["ids"]
    assert model.generate(question, TEN, memory=path)[0].token_ids == expected
    old, end = model.tokenizer, model.tokenizer.backend.id_to_token(expected[4])
    tokenizer = Tokenizer(old.backend, {"eos_token": str(end)}, old.chat_template, old.fingerprint)
    turn = LanguageModel(model.decoder, tokenizer).generate(question, TEN, memory=path)[0]
    assert turn.token_ids == expected[: expected.index(expected[4]) + 1]


def test_generate_refuses_memories_that_the_model_does_not_read(model: LanguageModel, memory: Path) -> None:
    tokenizer = build_byte_tokenizer()
    other = LanguageModel(Decoder(DecoderConfig.tiny("llama", vocab_size=tokenizer.vocab_size)), tokenizer)
    for source in (memory, model.load_memory(memory)):
        with pytest.raises(CorruptArtifactError, match="or compress again"):
            other.generate("a", memory=source)
    with pytest.raises(UsageError, match="this model reads a KVMemory or its file, not SummaryMemory"):
        model.generate("a", memory=summary_memory(model.decoder.config.hidden_size))  # pyright: ignore[reportArgumentType]
    for nothing, message in (([], "memory: the list is empty"), (3, "KVMemory or its file, not int")):
        with pytest.raises(UsageError, match=message):
            model.generate("a", memory=nothing)  # pyright: ignore[reportArgumentType]
    for source, message in (("", "the name is empty"), (memory.parent, "is a folder")):
        with pytest.raises(InputError, match=f"memory: .*{message}; give a file that laconic compress wrote"):
            model.generate("a", memory=source)
    with pytest.raises(InputError, match=r"no chat template .*; compress the text without chat"):
        model.compress(STORY, chat=True)
    with pytest.raises(InputError, match=r"no\.safetensors"):
        model.generate("a", memory=memory.parent / "no.safetensors")


def test_compress_writes_the_memory_of_the_command(model: LanguageModel, memory: Path, tmp_path: Path) -> None:
    config = KVCompressionConfig(keep=0.5)
    model.compress([STORY], config, names=["story.txt"]).save(tmp_path / "again.safetensors")
    again, command = (model.load_memory(path) for path in (tmp_path / "again.safetensors", memory))
    assert again.is_equal(command)
    assert again.metadata is not None
    assert command.metadata is not None
    assert again.metadata.documents == command.metadata.documents
    two = model.compress([STORY, f"{STORY} The end."], config)
    assert [int(n) for n in two.num_tokens] == [
        int(command.num_tokens[0]),
        len(model.tokenizer.encode(f"{STORY} The end.")),
    ]


def test_texts_are_str_and_a_model_is_not_its_decoder(model: LanguageModel) -> None:
    prompts: Any
    for prompts in (b"Once", ["Once", b"Once"], None, [None], 5, KVCompressionConfig(), [{"role": "user"}]):
        for name, call in (("prompts", model.generate), ("texts", model.compress)):
            with pytest.raises(
                UsageError, match=rf"{name}: give text \(str\), not (bytes|None|int|KVC|dict; .*ChatSess)"
            ):
                call(prompts)
    assert len(model.generate((text for text in ("Once", "The")), TEN)) == 2
    rows = [model.compress(texts, KVCompressionConfig("window")).B for texts in (STORY, (text for text in [STORY] * 2))]
    assert rows == [1, 2]
    for function in (laconic.compress_kv, lambda model, ids: laconic.generate(model, input_ids=[ids])):
        with pytest.raises(UsageError, match="a LanguageModel is not a decoder; pass its attribute decoder"):
            function(model, [1, 2, 3])  # pyright: ignore[reportArgumentType]
