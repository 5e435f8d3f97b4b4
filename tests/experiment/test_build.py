"""From a recipe to modules: new decoders, adapters by family, thoughts, rows of files, and a model part read back."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from laconic.config.load import load_recipe
from laconic.config.recipe import LoraConfig
from laconic.data.reasoning.answer_matching import CODI, TEXT
from laconic.data.synthetic.digits import build_digits_tokenizer
from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.experiment import build_model
from laconic.experiment.build import Experiment, build_experiment
from laconic.experiment.build_data import load_held_out
from laconic.experiment.load_run import load_run
from laconic.experiment.methods import build_method
from laconic.experiment.model_checkpoint import load_weights_into
from laconic.experiment.run_init import init_run
from laconic.latent.coconut import Coconut
from laconic.latent.icot import Icot
from laconic.models.decoder import Decoder
from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory
from laconic.training import checkpoint, sharded
from tests.conftest import TINY_RECIPE, needs
from tests.models.fixtures import FAMILIES, fresh

CPU = torch.device("cpu")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    return tmp_path / "tiny.toml"


def built(path: Path, *keys: str) -> Experiment:
    return build_experiment(load_recipe(path, keys)[0], CPU)


def test_a_new_decoder_is_drawn_as_the_recipe_says(tiny: Path) -> None:
    decoder = built(
        tiny, "model.hidden_size=64", "model.embedding_init_std=0.7", "model.num_hidden_layers=2"
    ).parts.decoder
    std = {name: p.std().item() for name, p in decoder.named_parameters() if p.ndim == 2}
    assert std["model.embed_tokens.weight"] == pytest.approx(0.7, rel=0.1)
    assert std["lm_head.weight"] == pytest.approx(0.02, rel=0.1)
    assert std["model.layers.0.self_attn.q_proj.weight"] == pytest.approx(64**-0.5, rel=0.1)
    assert std["model.layers.1.mlp.down_proj.weight"] == pytest.approx((128 * 4) ** -0.5, rel=0.1)
    plain = built(tiny, "model.init=normal", "model.init_seed=4").parts.decoder
    assert plain.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert torch.equal(
        built(tiny, "seed=4", "model.init=normal").parts.decoder.token_embedding.weight, plain.token_embedding.weight
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("modules", ["all", "attention"])
def test_the_maps_that_an_adapter_is_put_on(family: str, modules: str) -> None:
    needs("peft")
    model = build_model.add_lora(fresh(family), LoraConfig(rank=2, target_modules=modules), 0)
    wrapped = {name.split(".lora_A")[0].rsplit(".", 2)[-1] for name, _ in model.named_parameters() if "lora_A" in name}
    attention = {"gpt2": {"c_attn", "c_proj"}, "opt": {"q_proj", "k_proj", "v_proj", "out_proj"}}
    rest = {"gpt2": {"c_fc"}, "opt": {"fc1", "fc2"}}
    asked = attention.get(family, {"q_proj", "k_proj", "v_proj", "o_proj"})
    assert wrapped == (
        asked if modules == "attention" else asked | rest.get(family, {"gate_proj", "up_proj", "down_proj"})
    )
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout, config.bias) == (2, 32, 0.1, "none")


@pytest.mark.parametrize(
    ("what", "learns"),
    [
        ("full", {"decoder", "thoughts"}),
        ("lora", {"lora", "thoughts"}),
        ("thoughts", {"thoughts"}),
    ],
)
def test_what_learns(tiny: Path, what: str, learns: set[str]) -> None:
    needs("peft")
    method = built(tiny, f"train.trainable={what}").method
    found = {
        "thoughts" if name.startswith("thoughts") else "lora" if "lora_" in name else "decoder"
        for name, p in method.named_parameters()
        if p.requires_grad
    }
    assert found == learns


def test_thoughts_that_would_stay_as_they_start_are_refused(tiny: Path) -> None:
    made = built(tiny)
    assert made.parts.latents is not None
    made.parts.latents.vectors.requires_grad_(False)
    with pytest.raises(
        UsageError, match=r"^method kava would leave vectors of the thoughts as it starts; leave it out$"
    ):
        build_method(made.parts, made.recipe, 1)


ICOT = ("method=icot", "icot.tokens_removed_per_epoch=25", "train.micro_batch_size=4")
COCONUT = (
    "method=coconut", "latents.schedule=sequential", "latents.projection=none", "latents.num_latents=2",
    "coconut.latents_per_step=1", "coconut.max_stage=2", "coconut.epochs_per_stage=1",
)  # fmt: skip


@pytest.mark.parametrize("keys", [ICOT, COCONUT], ids=["icot", "coconut"])
def test_curricula_are_said_built_and_validated(tiny: Path, keys: tuple[str, ...]) -> None:
    tiny.write_text(TINY_RECIPE.replace("rounds = 1\n", "" if keys is COCONUT else "rounds = 1\n"))
    made = built(tiny, *keys)
    made.method.train()(made.training_data.batch(range(4), 1, 30)).loss.backward()
    assert made.validate is not None
    assert set(made.validate(0)) == {"accuracy"}
    assert not isinstance(made.method, Coconut) or made.method.eval_stage == 0
    made.validate(1)
    assert not isinstance(made.method, Coconut) or made.method.eval_stage == 1  # whatever this process has trained


def test_icot_restarts_only_while_a_chain_is_left(tiny: Path) -> None:
    method = built(tiny, *ICOT, "icot.remove_all_after=9").method  # an epoch has 25 steps, a chain 2 tokens
    assert isinstance(method, Icot)
    assert (method.steps_per_removal, method.max_chain_length) == (1, 2)
    terse = built(tiny, *ICOT, "data.digits.chain_style=equations", "data.digits.results_only_fraction=0.5").method
    assert isinstance(terse, Icot)
    assert terse.max_chain_length == 12


@pytest.mark.parametrize("method", ["cot", "nocot", "icot", "kava"])
def test_how_a_loss_is_averaged_is_said_by_the_table_of_its_method(tiny: Path, method: str) -> None:
    table = {"icot": "removing", "kava": "distilling"}.get(method, "scoring")
    made = built(tiny, f"method={method}", f"{table}.ce_reduction=row").method
    counts = cast(Any, made.eval()).loss_denominators(built(tiny).training_data.batch(range(4), 0, 0))
    assert (counts.get("student", 4.0), counts.get("teacher", 4.0)) == (4.0, 4.0)


def test_control_vectors_start_from_a_text(tiny: Path) -> None:
    made = built(tiny, "latents.control_init=copy:+-")
    rows = made.parts.decoder.token_embedding.weight[build_digits_tokenizer().encode("+-", add_special_tokens=False)]
    assert made.parts.latents is not None
    torch.testing.assert_close(made.parts.latents.begin, rows.mean(0))


def test_rows_of_files(tiny: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{i} + {i} =", "steps": [f"{2 * i % 10}"], "answer": f"{2 * i % 10}"} for i in range(10)]
    for name, part in (("train", rows[:8]), ("valid", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    text = TINY_RECIPE.replace("digits = { operations = 2, rows = 200, valid_rows = 20 }", "").replace(
        'format = "digits"', ""
    )
    (tmp_path / "f.toml").write_text(
        text.replace('kind = "digits"', 'path = "train.jsonl"\nvalid = "valid.jsonl"\nprompt = "ans"')
    )
    made = built(tmp_path / "f.toml", "train.batch_size=4")
    assert len(made.training_data) == 8
    assert cast(Any, made.training_data).longest == 1
    assert "8 rows read" in made.notes
    assert made.validate is not None
    assert set(made.validate(0)) == {"accuracy", "teacher_accuracy"}
    with pytest.raises(InputError, match=r"data\.test: absent; name the file of rows that are held out"):
        load_held_out(made.recipe, made.parts.tokenizer, 256, "test")
    with pytest.raises(InputError, match="8 of 8 rows are left, a batch asks for 16"):
        built(tmp_path / "f.toml", "train.batch_size=16")


def test_weights_of_another_size_are_not_copied(tmp_path: Path) -> None:
    fresh("llama", intermediate_size=20).save_pretrained(tmp_path / "other")
    with pytest.raises(
        CorruptArtifactError, match="its weights are of another model than the recipe's; take the recipe it was made by"
    ):
        load_weights_into(fresh("llama"), tmp_path / "other")


@pytest.mark.parametrize("what", ["full", "lora", "thoughts"])
@pytest.mark.parametrize("shards", [False, True])
def test_a_model_part_is_read_back_as_it_was(tiny: Path, tmp_path: Path, what: str, shards: bool) -> None:
    needs("peft")
    start = tmp_path / "runs/start"
    made = built(tiny, "method=cot")
    commit(made, start, shards=False)
    tiny.write_text(
        TINY_RECIPE[TINY_RECIPE.index("[latents]") :].join(
            ['method = "kava"\n[model]\ninit_from_run = "runs/start"\n', ""]
        )
    )
    made = built(tiny, f"train.trainable={what}", "lora.rank=2", "latents.control_init=normal")
    with torch.no_grad():
        for p in made.method.parameters():
            if p.requires_grad:
                p += 0.1 * torch.randn(p.shape)
    commit(made, tmp_path / "runs/b", shards=shards)
    found = load_run(tmp_path / "runs/b", CPU)
    batch = made.training_data.batch(range(4), 0, 0)
    learn = [
        {name for name, p in method.named_parameters() if p.requires_grad} for method in (made.method, found.method)
    ]
    assert learn[0] == learn[1]
    with torch.no_grad():
        loss = made.method.eval()(batch).loss
        assert torch.equal(found.method(batch).loss, loss)
    again = built(tiny, f"train.trainable={what}", "lora.rank=2", "latents.control_init=normal")
    checkpoint.load_model(tmp_path / "runs/b/steps/step-000001", again.checkpoint, again.method)
    with torch.no_grad():
        assert torch.equal(again.method.eval()(batch).loss, loss)


def commit(made: Experiment, folder: Path, *, shards: bool) -> None:
    """A step of a run, without an optimizer."""
    run = RunDirectory(folder)

    def write(files: ManifestWriter) -> None:
        if not shards:
            made.checkpoint.save(files)
            return
        trained = {name: p for name, p in made.method.named_parameters() if p.requires_grad}
        sharded.write_shards(files, checkpoint.SHARDS_FOLDER, trained, 0)
        made.checkpoint.save_metadata(files)

    with run.lock():
        init_run(run, made.recipe, "auto", {})
        run.commit_step(1, write, made.fingerprints)


@pytest.mark.parametrize(
    ("text", "prediction"),
    [
        ("18", "18"), ("The answer is: 1,234", "1234"), ("$1,234.50", "1234.50"), ("16-3", "-3"), ("3/4", "4"),
        ("50%", "50"), (".5", "5"), ("1e5", "5"), ("−5", "5"), ("18, not 20", "20"), ("seven", None), ("", None),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text: str, prediction: str | None) -> None:
    assert CODI.extract(text) == prediction


def test_what_is_right() -> None:
    assert CODI.is_correct("18.0", "18")
    assert not CODI.is_correct("18", "seven")
    assert TEXT.extract("a\nThe answer is: yes ") == "yes"
    assert TEXT.extract("") is None
    assert TEXT.is_correct("yes", " yes")


def test_a_decoder_for_a_measurement_is_finite() -> None:
    decoder = build_model.build_random_decoder(fresh("gpt2").config, CPU)
    assert isinstance(decoder, Decoder)
    assert decoder(decoder.embed(torch.arange(4)[None])).hidden.isfinite().all()


def test_a_name_that_the_hub_does_not_give() -> None:
    with pytest.raises(InputError, match="org/none: the hub gives no configuration: "):
        build_model.download_config_and_tokenizer("org/none", None)
