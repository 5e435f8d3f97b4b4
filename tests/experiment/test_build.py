"""`build_experiment`: new decoders, LoRA per family, latents, rows of files, and models loaded from a step."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from laconic.config.load import load_recipe
from laconic.config.recipe import LoraConfig
from laconic.data.synthetic.digits import build_digits_tokenizer
from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.evaluation.validation import build_validation
from laconic.experiment.from_recipe import build_model
from laconic.experiment.from_recipe.build import Experiment, build_experiment
from laconic.experiment.from_recipe.build_data import load_held_out_rows
from laconic.experiment.from_recipe.build_nested import load_decoder
from laconic.experiment.from_recipe.methods import build_method
from laconic.experiment.load_run import load_run
from laconic.experiment.model_checkpoint import load_weights_into
from laconic.experiment.run_init import init_run
from laconic.latent.coconut import Coconut
from laconic.latent.icot import Icot
from laconic.models.checkpoints.weight_memory import stack_rows
from laconic.models.checkpoints.weights import weights_fingerprint
from laconic.models.decoder import Decoder
from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory
from laconic.training import checkpoint, sharded
from tests.conftest import needs
from tests.models.fixtures import FAMILIES, fresh
from tests.tiny_recipes import TINY_RECIPE

CPU = torch.device("cpu")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY_RECIPE)
    return tmp_path / "tiny.toml"


def build(path: Path, *keys: str) -> Experiment:
    return build_experiment(load_recipe(path, keys)[0], CPU)


def test_build_decoder_initialisation(tiny: Path) -> None:
    decoder = build(
        tiny, "model.hidden_size=64", "model.embedding_init_std=0.7", "model.num_hidden_layers=2"
    ).parts.decoder
    std = {name: p.std().item() for name, p in decoder.named_parameters() if p.ndim == 2}
    assert std["model.embed_tokens.weight"] == pytest.approx(0.7, rel=0.1)
    assert std["lm_head.weight"] == pytest.approx(0.02, rel=0.1)
    assert std["model.layers.0.self_attn.q_proj.weight"] == pytest.approx(64**-0.5, rel=0.1)
    assert std["model.layers.1.mlp.down_proj.weight"] == pytest.approx((128 * 4) ** -0.5, rel=0.1)
    normal = build(tiny, "model.init=normal", "model.init_seed=4").parts.decoder
    assert normal.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert torch.equal(
        build(tiny, "seed=4", "model.init=normal").parts.decoder.token_embedding.weight, normal.token_embedding.weight
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("modules", ["all", "attention"])
def test_add_lora_target_modules(family: str, modules: str) -> None:
    needs("peft")
    model = build_model.add_lora(fresh(family), LoraConfig.model_validate({"rank": 2, "target_modules": modules}), 0)
    wrapped = {name.split(".lora_A")[0].rsplit(".", 2)[-1] for name, _ in model.named_parameters() if "lora_A" in name}
    attention = {"gpt2": {"c_attn", "c_proj"}, "opt": {"q_proj", "k_proj", "v_proj", "out_proj"}}
    rest = {"gpt2": {"c_fc"}, "opt": {"fc1", "fc2"}}
    expected = attention.get(family, {"q_proj", "k_proj", "v_proj", "o_proj"})
    assert wrapped == (
        expected if modules == "attention" else expected | rest.get(family, {"gate_proj", "up_proj", "down_proj"})
    )
    config: Any = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout, config.bias) == (2, 32, 0.1, "none")


@pytest.mark.parametrize(
    ("trainable", "parts"),
    [
        ("full", {"decoder", "latents"}),
        ("lora", {"lora", "latents"}),
        ("latents", {"latents"}),
    ],
)
def test_trainable_parameters(tiny: Path, trainable: str, parts: set[str]) -> None:
    needs("peft")
    method = build(tiny, f"train.trainable={trainable}").method
    trained = {
        "latents" if name.startswith("latent_thoughts") else "lora" if "lora_" in name else "decoder"
        for name, p in method.named_parameters()
        if p.requires_grad
    }
    assert trained == parts


@pytest.mark.parametrize(
    "keys", [("method=cot", "latents.num_latents=4096"), ("method=pccot", "kv_distillation.layers=[9]")]
)
def test_build_ignores_tables_of_other_methods(tiny: Path, keys: tuple[str, ...]) -> None:
    """A run can change only its method; tables that it does not use stay in the recipe."""
    assert build(tiny, *keys).method is not None


def test_build_method_refuses_untrained_parameters(tiny: Path) -> None:
    experiment = build(tiny)
    assert experiment.parts.latents is not None
    experiment.parts.latents.vectors.requires_grad_(False)
    with pytest.raises(UsageError, match="kava does not train vectors"):
        build_method(experiment.parts, experiment.recipe, 1)


ICOT = ("method=icot", "icot.tokens_removed_per_epoch=25", "train.micro_batch_size=4")
COCONUT = (
    "method=coconut", "latents.schedule=sequential", "latents.projection=none", "latents.num_latents=2",
    "coconut.latents_per_step=1", "coconut.max_stage=2", "coconut.epochs_per_stage=1",
)  # fmt: skip


def test_settings_that_do_not_fit_are_refused_before_rows_are_read(tiny: Path) -> None:
    tiny.write_text(TINY_RECIPE.replace("jacobi_iterations = 1\n", ""))
    keys = ("latents.num_latents=3", "data.source=file", "data.path=gone.jsonl", "data.format=coconut")
    with pytest.raises(UsageError, match=r"coconut requires latents\.num_latents = 2"):
        build(tiny, *COCONUT, *keys)


@pytest.mark.parametrize("keys", [ICOT, COCONUT], ids=["icot", "coconut"])
def test_curriculum_train_and_validate(tiny: Path, keys: tuple[str, ...]) -> None:
    tiny.write_text(
        TINY_RECIPE.replace("jacobi_iterations = 1\n", "" if keys is COCONUT else "jacobi_iterations = 1\n")
    )
    experiment = build(tiny, *keys)
    experiment.method.train()(experiment.training_data.batch(range(4), 1, 30)).loss.backward()
    validate = build_validation(experiment.recipe, experiment.parts, experiment.method, CPU)
    assert validate is not None
    assert set(validate(0)) == {"accuracy"}
    assert not isinstance(experiment.method, Coconut) or experiment.method.eval_stage == 0
    validate(1)
    assert (
        not isinstance(experiment.method, Coconut) or experiment.method.eval_stage == 1
    )  # by the epoch, not by training


def test_icot_max_chain_length(tiny: Path) -> None:
    method = build(tiny, *ICOT, "icot.remove_all_after=9").method  # an epoch has 25 steps, a chain 2 tokens
    assert isinstance(method, Icot)
    assert (method.steps_per_removal, method.max_chain_length) == (1, 2)
    equations = build(tiny, *ICOT, "data.digits.chain_style=equations", "data.digits.results_only_fraction=0.5").method
    assert isinstance(equations, Icot)
    assert equations.max_chain_length == 12


def test_control_init_copies_a_text(tiny: Path) -> None:
    experiment = build(tiny, "latents.control_init=copy:+-")
    rows = experiment.parts.decoder.token_embedding.weight[
        build_digits_tokenizer().encode("+-", add_special_tokens=False)
    ]
    assert experiment.parts.latents is not None
    torch.testing.assert_close(experiment.parts.latents.begin, rows.mean(0))


def test_build_data_from_files(tiny: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{i} + {i} =", "steps": [f"{2 * i % 10}"], "answer": f"{2 * i % 10}"} for i in range(10)]
    for name, part in (("train", rows[:8]), ("valid", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    text = TINY_RECIPE.replace("digits = { num_operations = 2, train_rows = 200, valid_rows = 20 }", "").replace(
        'format = "digits"', ""
    )
    (tmp_path / "f.toml").write_text(
        text.replace('source = "digits"', 'path = "train.jsonl"\nvalid = "valid.jsonl"\nanswer_prompt = "ans"')
    )
    experiment = build(tmp_path / "f.toml", "train.batch_size=4")
    assert len(experiment.training_data) == 8
    assert cast(Any, experiment.training_data).max_length == 1
    assert "8 of 8 rows are used" in experiment.notes
    validate = build_validation(experiment.recipe, experiment.parts, experiment.method, CPU)
    assert validate is not None
    assert set(validate(0)) == {"accuracy", "teacher_accuracy"}
    with pytest.raises(InputError, match=r"data\.test is not set; name a file"):
        load_held_out_rows(experiment.recipe, experiment.parts.tokenizer, 256, "test")
    with pytest.raises(InputError, match=r"8 of 8 rows.* 16"):
        build(tmp_path / "f.toml", "train.batch_size=16")


def test_load_decoder_does_not_copy_the_loaded_weights(tmp_path: Path) -> None:
    fresh("llama").save_pretrained(tmp_path / "folder")
    block: Any = load_decoder(tmp_path / "folder", torch.float32, CPU).layers[0]
    assert stack_rows([block.mlp.gate_proj.weight, block.mlp.up_proj.weight]) is not None  # still in one block


def test_load_decoder_binds_runs_to_the_rounded_weights(tmp_path: Path) -> None:
    fresh("llama").save_pretrained(tmp_path / "folder")
    decoder = load_decoder(tmp_path / "folder", torch.bfloat16, CPU)
    assert decoder.fingerprint == weights_fingerprint(decoder.state_dict().items())
    assert decoder.fingerprint != Decoder.from_pretrained(tmp_path / "folder", "bfloat16").fingerprint


def test_load_weights_into_other_shapes(tmp_path: Path) -> None:
    fresh("llama", intermediate_size=20).save_pretrained(tmp_path / "other")
    with pytest.raises(CorruptArtifactError, match="its weights do not fit the recipe's model"):
        load_weights_into(fresh("llama"), tmp_path / "other")


@pytest.mark.parametrize("trainable", ["full", "lora", "latents"])
@pytest.mark.parametrize("shards", [False, True])
def test_load_run_round_trip(tiny: Path, tmp_path: Path, trainable: str, shards: bool) -> None:
    needs("peft")
    start = tmp_path / "runs/start"
    experiment = build(tiny, "method=cot")
    commit(experiment, start, shards=False)
    tiny.write_text(
        TINY_RECIPE[TINY_RECIPE.index("[latents]") :].join(
            ['method = "kava"\n[model]\ninit_from_run = "runs/start"\n', ""]
        )
    )
    experiment = build(tiny, f"train.trainable={trainable}", "lora.rank=2", "latents.control_init=normal")
    with torch.no_grad():
        for p in experiment.method.parameters():
            if p.requires_grad:
                p += 0.1 * torch.randn(p.shape)
    commit(experiment, tmp_path / "runs/b", shards=shards)
    loaded = load_run(tmp_path / "runs/b", CPU)
    batch = experiment.training_data.batch(range(4), 0, 0)
    trained = [
        {name for name, p in method.named_parameters() if p.requires_grad}
        for method in (experiment.method, loaded.method)
    ]
    assert trained[0] == trained[1]
    with torch.no_grad():
        loss = experiment.method.eval()(batch).loss
        assert torch.equal(loaded.method(batch).loss, loss)
    again = build(tiny, f"train.trainable={trainable}", "lora.rank=2", "latents.control_init=normal")
    checkpoint.load_model(tmp_path / "runs/b/steps/step-000001", again.checkpoint, again.method)
    with torch.no_grad():
        assert torch.equal(again.method.eval()(batch).loss, loss)


def commit(experiment: Experiment, folder: Path, *, shards: bool) -> None:
    """Commit a step of a run without an optimizer."""
    run = RunDirectory(folder)

    def write(files: ManifestWriter) -> None:
        if not shards:
            experiment.checkpoint.save(files)
            return
        trained = {name: p for name, p in experiment.method.named_parameters() if p.requires_grad}
        sharded.write_shards(files, checkpoint.SHARDS_FOLDER, trained, 0)
        experiment.checkpoint.save_config_files(files)

    with run.lock():
        init_run(run, experiment.recipe, "auto", {})
        run.commit_step(1, write, experiment.fingerprints)


def test_build_random_decoder_is_finite() -> None:
    decoder = build_model.build_random_decoder(fresh("gpt2").config, CPU)
    assert isinstance(decoder, Decoder)
    assert decoder(decoder.embed(torch.arange(4)[None])).hidden_states.isfinite().all()
