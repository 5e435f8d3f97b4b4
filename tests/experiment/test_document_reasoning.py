"""Questions about documents: answers and losses follow the summary vectors; runs train, resume, compress, answer."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.batches import ReasoningBatch
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.data import DigitsConfig
from laconic.config.load import load_recipe
from laconic.config.methods import CompressionConfig, DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.data.synthetic.digit_documents import DOCUMENT_VOCABULARY, DigitDocumentsDataset
from laconic.errors import UsageError
from laconic.experiment.from_recipe.build import build_experiment
from laconic.experiment.text_models.document_reasoning import DocumentReasoning, add_documents, compress_documents
from laconic.latent.answering import AnswerDecoding
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from tests.conftest import RunCli, call_cli, check_refused

pytestmark = pytest.mark.usefixtures("unchecked")
CPU = torch.device("cpu")
TASK = DigitsConfig(num_operations=2, chain_style="bracket_tokens", document_tokens=24, train_rows=500, valid_rows=20)
RECIPE = """method = "kava"
[model]
family = "llama"
tokenizer = "digit_documents"
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 2
[compression]
max_vectors = 3
[latents]
num_latents = 2
jacobi_iterations = 1
[data]
source = "digits"
format = "digits"
chain_steps = "all"
segment_tokens = 12
digits = { num_operations = 2, document_tokens = 24, train_rows = 200, valid_rows = 20, test_rows = 10 }
[validation]
max_rows = 4
max_tokens = 6
[train]
steps = 2
batch_size = 8
save_every = 1
"""


def build_decoder() -> Decoder:
    config = DecoderConfig.tiny("llama", vocab_size=len(DOCUMENT_VOCABULARY), initializer_range=0.2)
    return Decoder(config, seed=1).double()


def build_method(name: str, decoder: Decoder, **options: Any) -> DocumentReasoning:
    config = CompressionConfig(max_vectors=3, summary_init="normal", **options)
    summaries = SummaryParameters(decoder, config, eos_token_id=None)
    compressor = AutoCompressor(decoder, summaries, config, total_steps=1)
    latents = laconic.LatentThoughts(decoder, num_latents=2, num_iterations=2)
    methods: dict[str, Callable[[], Any]] = {
        "cot": lambda: laconic.Cot(decoder),
        "nocot": lambda: laconic.NoCot(decoder),
        "pccot": lambda: laconic.Pccot(decoder, latents, DistillationConfig()),
        "kava": lambda: laconic.Kava(
            decoder, latents, DistillationConfig(), KVSelectionConfig(), KVDistillationConfig()
        ),
    }
    return add_documents(methods[name](), compressor, segment_tokens=12)


def find_tokens(method: DocumentReasoning) -> Tensor:
    """Return the summary tokens."""
    tokens = method.compressor.summaries.tokens
    assert tokens is not None
    return tokens


@pytest.fixture
def batch() -> ReasoningBatch:
    return DigitDocumentsDataset(0, TASK).batch(range(5), 0, 0)


def decode(max_tokens: int = 8) -> AnswerDecoding:
    return AnswerDecoding(max_tokens, (DOCUMENT_VOCABULARY.index("<unk>"),), lambda ids: " ".join(map(str, ids)))


def test_loss_is_that_of_the_text_after_the_vectors(batch: ReasoningBatch) -> None:
    """Without any shared code: all vectors and tokens of a row in one pass over their embeddings."""
    decoder = build_decoder()
    method = build_method("cot", decoder)
    output = method(batch)
    model, nll, count = method.compressor.segment_model, 0.0, 0
    for row in range(batch.B):
        one = batch.select_rows([row])
        assert one.document_ids is not None
        vectors = torch.zeros(1, 0, decoder.config.hidden_size, dtype=torch.float64)
        for ids in one.document_ids.split(12, 1):
            tokens = find_tokens(method).to(torch.float64)[None]
            states = decoder(torch.cat([vectors, decoder.embed(ids), tokens], 1)).hidden_states
            vectors = torch.cat([vectors, states[:, -3:]], 1)
        text = torch.cat([one.question_ids, one.chain_ids, one.answer_ids], 1)
        hidden = decoder(torch.cat([vectors, decoder.embed(text)], 1)).hidden_states
        n = one.question_ids.shape[1]
        log_probs = decoder.logits(hidden[:, 6 + n - 1 : -1]).log_softmax(-1)
        nll -= float(log_probs.detach().gather(2, text[:, n:, None]).sum())
        count += text.shape[1] - n
    assert model.config.fixed_length == 3
    assert float(output.loss) == pytest.approx(nll / count, rel=1e-9)


@pytest.mark.parametrize("name", ["cot", "nocot", pytest.param("pccot", marks=pytest.mark.slow), "kava"])
def test_every_summary_parameter_gets_a_gradient(name: str, batch: ReasoningBatch) -> None:
    method = build_method(name, build_decoder())
    method(batch).loss.backward()
    gradient = find_tokens(method).grad
    assert gradient is not None
    assert bool((gradient.abs().sum(1) > 0).all())


@pytest.mark.medium
@pytest.mark.parametrize("name", ["cot", "nocot", pytest.param("pccot", marks=pytest.mark.slow), "kava"])
def test_answers_depend_on_the_row_and_its_document_only(name: str, batch: ReasoningBatch) -> None:
    method = build_method(name, build_decoder())
    answers = method.answer(batch, decode())
    alone = [method.answer(batch.select_rows([row]), decode()) for row in range(batch.B)]
    assert answers.token_ids == tuple(answer.token_ids[0] for answer in alone)
    assert answers.passes == tuple(answer.passes[0] for answer in alone)
    assert batch.document_ids is not None
    other = replace(batch, document_ids=batch.document_ids.flip(1))
    assert method.answer(other, decode()).token_ids != answers.token_ids
    # the state that is given goes before the documents
    state = method.find_state(batch, None)
    without = replace(batch, document_ids=None, document_mask=None)
    assert method.answer(without, decode(), state=state).token_ids == answers.token_ids
    assert method.answer(without, decode()).token_ids != answers.token_ids


def test_documents_of_different_lengths_are_padded_without_effect(batch: ReasoningBatch) -> None:
    method, model = build_method("nocot", build_decoder()), None
    model = method.compressor.segment_model
    assert batch.document_ids is not None
    assert batch.document_mask is not None
    mask = batch.document_mask.clone()
    mask[1, 12:], mask[2, 17:], mask[3] = False, False, False
    short = replace(batch, document_mask=mask)
    with torch.no_grad():
        memory = compress_documents(model, batch.document_ids, mask, 12)
    assert memory.num_vectors.tolist() == [6, 3, 6, 0, 6]
    answers = method.answer(short, decode())
    for row, length in ((1, 12), (2, 17)):
        one = short.select_rows([row])
        assert one.document_ids is not None
        assert one.document_mask is not None
        cut = replace(one, document_ids=one.document_ids[:, :length], document_mask=one.document_mask[:, :length])
        assert method.answer(cut, decode()).token_ids[0] == answers.token_ids[row]
    none = replace(short.select_rows([3]), document_ids=None, document_mask=None)
    assert method.answer(none, decode()).token_ids[0] == answers.token_ids[3]


def test_thoughts_follow_the_document(batch: ReasoningBatch) -> None:
    method: Any = build_method("kava", build_decoder())
    rollout = method.think(batch)
    state: KVCache = method.find_state(batch, None)
    inner = method.method.think(batch, state=state)
    assert torch.equal(rollout.latents, inner.latents)
    assert not torch.allclose(rollout.latents, method.method.think(batch).latents)
    assert not hasattr(build_method("cot", build_decoder()), "think")


def test_memory_needs_consecutive_positions() -> None:
    decoder = Decoder(DecoderConfig.tiny("gpt2", vocab_size=len(DOCUMENT_VOCABULARY)), seed=0)
    with pytest.raises(UsageError, match="need consecutive positions"):
        build_method("cot", decoder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "recipe.toml").write_text(RECIPE)
    assert call_cli("train", folder / "recipe.toml", "--out", folder / "run") == 0
    return folder / "run"


@pytest.mark.medium
def test_run_compresses_and_answers_after_the_memory(run: Path, run_cli: RunCli, tmp_path: Path) -> None:
    reasoner: Any = laconic.load(run)
    dataset = DigitDocumentsDataset(0, DigitsConfig(num_operations=2, document_tokens=24, train_rows=200))
    batch = dataset.batch([0], 0, 0)
    assert batch.document_ids is not None
    question, document = (
        " ".join(DOCUMENT_VOCABULARY[int(i)] for i in ids[0] if DOCUMENT_VOCABULARY[int(i)] != "<bos>")
        for ids in (batch.question_ids, batch.document_ids)
    )
    memory = reasoner.compress([document])
    assert (memory.B, memory.M) == (1, 6)
    config = laconic.GenerationConfig(max_tokens=5)
    answer = reasoner.generate([question], config, memory=memory)[0]
    expected = reasoner.method.answer(batch, reasoner.build_decoding(config))
    assert answer.token_ids == expected.token_ids[0]
    thoughts = reasoner.think(question, memory=memory)
    assert torch.allclose(thoughts.latents, reasoner.method.think(batch).latents[0], atol=1e-6)
    assert not torch.allclose(thoughts.latents, reasoner.think(question).latents, atol=1e-4)
    # several questions about one document, and the command line
    both = reasoner.generate([question, question], config, memory=memory)
    assert [a.token_ids for a in both] == [answer.token_ids] * 2
    (tmp_path / "document.txt").write_text(document)
    file = tmp_path / "memory.safetensors"
    result = run_cli("compress", run, tmp_path / "document.txt", "--out", file)
    assert result.code == 0, result.err
    printed = run_cli("generate", run, question, "--memory", file, "--max-tokens", 5, "--format", "json")
    assert json.loads(printed.out)["generations"][0]["ids"] == list(answer.token_ids)
    refused = run_cli("generate", run, question, "--memory", file, "--memory", file)
    check_refused(refused, 2, "--memory: 2 files")
    with pytest.raises(UsageError, match="a memory of 2 texts needs 2 questions, one each, not 3"):
        reasoner.generate(["a ="] * 3, memory=reasoner.compress([document, document]))


def test_run_reads_a_memory_of_keys_and_values(run: Path) -> None:
    """`compress_kv` of the run's own decoder with all tokens is the document itself."""
    reasoner: Any = laconic.load(run)
    ids = reasoner.tokenizer.encode("a3 to b4 of c5", add_special_tokens=False)
    memory = laconic.compress_kv(reasoner.decoder, ids, laconic.KVCompressionConfig(keep=1.0))
    answer = reasoner.generate("a + b * c =", laconic.GenerationConfig(max_tokens=5), memory=memory)[0]
    state = reasoner.decoder(reasoner.decoder.embed(torch.tensor([ids]))).cache
    batch = laconic.experiment.from_recipe.methods.build_questions_batch(
        reasoner.tokenizer, reasoner.recipe.data, ["a + b * c ="]
    )
    with torch.no_grad():
        whole = reasoner.method.answer(
            batch, reasoner.build_decoding(laconic.GenerationConfig(max_tokens=5)), state=state
        )
    assert answer.token_ids == whole.token_ids[0]


@pytest.mark.medium
def test_runs_are_evaluated_inspected_and_exported(run: Path, run_cli: RunCli, tmp_path: Path) -> None:
    for args in (("evaluate", run, "--tasks", "test"), ("audit", run, "--task", "test", "--limit", 10)):
        result = run_cli(*args)
        assert result.code == 0, result.err
    result = run_cli("inspect", run, "--task", "test", "--limit", 2, "--out", tmp_path / "inspect.html")
    assert result.code == 0, result.err
    assert run_cli("export", run, "--out", tmp_path / "export").code == 0
    ours: Any = laconic.load(tmp_path / "export")
    theirs: Any = laconic.load(run)
    memory = ours.compress(["a3 to b4 of c5"])
    config = laconic.GenerationConfig(max_tokens=4)
    assert ours.generate("a + b =", config, memory=memory) == theirs.generate("a + b =", config, memory=memory)
    refused = run_cli("export", run, "--out", tmp_path / "vllm", "--to", "vllm")
    check_refused(refused, 2, "follow summary vectors of documents")


def test_training_goes_on_with_the_vectors_of_an_earlier_run(run: Path, tmp_path: Path) -> None:
    text = RECIPE.split("[compression]")
    start = f'method = "cot"\n[model]\ninit_from_run = "{run}"\n[compression]{text[1]}'
    (tmp_path / "next.toml").write_text(start)
    experiment = build_experiment(load_recipe(tmp_path / "next.toml")[0], CPU)
    earlier: Any = laconic.load(run)
    ours, theirs = experiment.parts.summary_parameters, earlier.run.parts.summary_parameters
    assert ours is not None
    assert ours.tokens is not None
    assert torch.equal(ours.tokens, theirs.tokens)
    (tmp_path / "other.toml").write_text(start.replace("max_vectors = 3", "max_vectors = 4"))
    with pytest.raises(UsageError, match="has other sizes"):
        build_experiment(load_recipe(tmp_path / "other.toml")[0], CPU)


def test_a_document_may_be_longer_than_the_context(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    keys = ("data.digits.document_tokens=120", "model.max_position_embeddings=64", "compression.max_vectors=1")
    experiment = build_experiment(load_recipe(tmp_path / "recipe.toml", keys)[0], CPU)
    with torch.no_grad():
        output = experiment.method(experiment.training_data.batch([0], 0, 0))
    assert bool(output.loss.isfinite())
    with pytest.raises(UsageError, match="do not fit: llama has 64 positions"):
        build_experiment(load_recipe(tmp_path / "recipe.toml", (*keys, "data.segment_tokens=80"))[0], CPU)


@pytest.mark.medium
def test_rows_of_files_with_documents(tmp_path: Path, run_cli: RunCli) -> None:
    facts = [
        {"document": f"a {i % 10} to b {i // 10}", "question": f"a + b * {i} =", "answer": str(i)} for i in range(40)
    ]
    rows = [fact | {"steps": ["1"]} for fact in facts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plain.jsonl").write_text(
        "".join(json.dumps({k: v for k, v in row.items() if k != "document"}) + "\n" for row in rows)
    )
    data = '[data]\nsource = "file"\npath = "rows.jsonl"\nformat = "pccot"\nchain_steps = "all"\nsegment_tokens = 8\n'
    recipe = RECIPE[: RECIPE.index("[data]")] + data + "[train]\nsteps = 1\nbatch_size = 4\n"
    recipe = recipe.replace('tokenizer = "digit_documents"', 'tokenizer = "bytes"\nmax_position_embeddings = 512')
    (tmp_path / "recipe.toml").write_text(recipe)
    result = run_cli("train", tmp_path / "recipe.toml", "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert "rows with a document: 40" in result.err
    plan = run_cli("train", tmp_path / "recipe.toml", "--plan", "--format", "json")
    assert json.loads(plan.out)["tokens"]["document"]["max"] == 10
    refused = run_cli(
        "train", tmp_path / "recipe.toml", f"data.path={tmp_path}/plain.jsonl", "--out", tmp_path / "other"
    )
    check_refused(refused, 66, "no row has a document")
    without = recipe.replace("[compression]\nmax_vectors = 3\n", "")
    (tmp_path / "without.toml").write_text(without)
    result = run_cli("train", tmp_path / "without.toml", "--out", tmp_path / "third")
    assert "documents of rows are not read" in result.err
    other_document = rows[3] | {"document": "a 5 to b 9"}
    (tmp_path / "valid.jsonl").write_text(json.dumps(other_document) + "\n")
    valid, out = f"data.valid={tmp_path}/valid.jsonl", tmp_path / "fourth"
    refused = run_cli("train", tmp_path / "without.toml", valid, "--out", out)
    check_refused(refused, 66, "1 training questions are also held out")
    result = run_cli("train", tmp_path / "recipe.toml", valid, "--out", out)
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_vectors = 3", 'max_vectors = 3\nsummary = "select"', "compression.summary: 'select': answers"),
        ("document_tokens = 24, ", "", "data.digits.document_tokens: goes with a table [compression]"),
    ],
)
def test_settings_without_a_meaning_are_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.replace(old, new))
    with pytest.raises(UsageError) as caught:
        load_recipe(tmp_path / "recipe.toml")
    assert message in str(caught.value)
