"""LoRA adapters: exchanged with transformers and peft in both directions, merged, and refused."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from laconic import LanguageModel
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import BusyError, InputError, NonFiniteError, UnsafeFileError, UsageError
from laconic.experiment.lora import lora
from laconic.experiment.lora.adapter_config import ADAPTER_CONFIG_FILE
from laconic.models.decoder import Decoder
from laconic.storage import atomic, safetensors_header
from laconic.storage.atomic import save_tensors
from tests.conftest import needs
from tests.models.fixtures import FAMILIES, fresh
from tests.tolerances import FLOAT32, error

if find_spec("transformers") and find_spec("peft"):
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

IDS = torch.tensor([[5, 17, 3, 60, 22, 9], [3, 3, 80, 41, 2, 17]])
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_alpha": 8},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "token rows": {"trainable_token_indices": [3, 17]},
}
pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings(
        "ignore:fan_in_fan_out is set to:UserWarning"
    ),  # peft, for GPT-2's Conv1D in transformers
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def optional() -> None:
    needs("transformers")
    needs("peft")


def peft_config(kind: str, targets: Any = "all-linear") -> "LoraConfig":
    return LoraConfig(r=4, target_modules=targets, **KINDS[kind])


def our_logits(model: "Decoder | PeftModel") -> Tensor:
    return model.logits(model(model.embed(IDS)).hidden_states)


def hf_logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS).logits


def train_adapter(model: "PeftModel", logits: Callable[[Any], Tensor]) -> Tensor:
    """Take four steps of next-token prediction, perturb every adapter weight, and return the logits."""
    generator = torch.Generator().manual_seed(3)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trainable, 1e-2), []
    for _ in range(4):
        loss = nn.functional.cross_entropy(logits(model)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        for p in trainable:
            p += 0.05 * torch.randn(p.shape, generator=generator)
    return logits(model.eval()).detach()


# LoRA and rsLoRA are part of DoRA but for a scale, so that they run for one family; the others differ in their layers
CASES = [
    pytest.param(family, kind, marks=[pytest.mark.slow] if family != "llama" and kind in ("LoRA", "rsLoRA") else [])
    for family in FAMILIES
    for kind in KINDS
]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Save a model of each family; GPT-2, OPT and Qwen 2 have tied embeddings."""
    decoder = fresh(request.param, **({"tie_word_embeddings": True} if request.param == "qwen2" else {}))
    decoder.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.medium
@pytest.mark.parametrize(("folder", "kind"), CASES, indirect=["folder"])
def test_adapter_loads_in_peft_and_merges(folder: Path, kind: str) -> None:
    base = our_logits(Decoder.from_pretrained(folder))
    model = lora.add_adapter(Decoder.from_pretrained(folder), peft_config(kind))
    assert error(our_logits(model), base) == 0 or kind == "DoRA"
    logits = train_adapter(model, our_logits)
    assert error(logits, base) > 1e-2
    lora.save_adapter(model, folder.parent / "adapter")
    config = json.loads((folder.parent / "adapter" / "adapter_config.json").read_text())
    assert (config["task_type"], config["base_model_name_or_path"]) == ("CAUSAL_LM", str(folder))
    peft_model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), folder.parent / "adapter"
    ).eval()
    assert error(hf_logits(peft_model), logits) <= FLOAT32
    loaded = lora.load_adapter(Decoder.from_pretrained(folder), folder.parent / "adapter")
    assert error(our_logits(loaded), logits) == 0
    assert not any(p.requires_grad for p in loaded.parameters())

    merged = lora.merge_adapter(model)
    assert error(our_logits(merged), logits) <= FLOAT32
    shapes = {
        name: (type(module), p.shape) for name, module in merged.named_modules() for p in module.parameters(False)
    }
    original = Decoder.from_pretrained(folder)
    assert shapes == {
        n: (type(module), p.shape) for n, module in original.named_modules() for p in module.parameters(False)
    }
    assert merged.state_dict().keys() == original.state_dict().keys()
    assert all(p.requires_grad for p in merged.parameters())
    assert merged.fingerprint != original.fingerprint
    merged.save_pretrained(folder.parent / "merged")
    assert error(hf_logits(AutoModelForCausalLM.from_pretrained(folder.parent / "merged").eval()), logits) <= FLOAT32
    assert Decoder.from_pretrained(folder.parent / "merged").fingerprint == merged.fingerprint


@pytest.mark.parametrize(("folder", "kind"), [case for case in CASES if case.values[1] != "LoRA"], indirect=["folder"])
def test_peft_adapter_loads(folder: Path, kind: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder)
    config = peft_config(kind)
    config.task_type = "CAUSAL_LM"
    model = get_peft_model(reference, config)
    logits = train_adapter(model, hf_logits)
    model.save_pretrained(str(folder.parent / "adapter"))
    loaded = lora.load_adapter(Decoder.from_pretrained(folder), folder.parent / "adapter")
    assert error(our_logits(loaded), logits) <= FLOAT32
    assert error(our_logits(lora.merge_adapter(loaded)), logits) <= FLOAT32


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_peft_adapter_with_biases_of_its_own_is_not_merged(tmp_path: Path) -> None:
    config = peft_config("LoRA", ["q_proj"])
    config.lora_bias, config.task_type = True, "CAUSAL_LM"
    decoder = fresh("llama")
    decoder.save_pretrained(tmp_path / "base")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(reference, config).save_pretrained(str(tmp_path / "adapter"))
    model = lora.load_adapter(decoder, tmp_path / "adapter")
    with pytest.raises(InputError, match=r"lora_bias on .*q_proj, which has no bias"):
        lora.merge_adapter(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_linear_targets_the_layers_of_the_blocks(name: str) -> None:
    decoder = fresh(name)
    maps = {key for key, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    model = lora.add_adapter(decoder, peft_config("LoRA"))
    wrapped = {key.removesuffix(".base_layer") for key, _ in decoder.named_modules() if key.endswith(".base_layer")}
    assert wrapped == maps - {"lm_head"}
    assert {p.requires_grad for key, p in model.named_parameters() if "lora_" not in key} == {False}


def test_adapter_is_float32_on_a_bfloat16_base_and_trains_further(tmp_path: Path) -> None:
    model = lora.add_adapter(fresh("llama").bfloat16(), peft_config("LoRA"))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    lora.save_adapter(model, tmp_path / "adapter")
    loaded = lora.load_adapter(fresh("llama"), tmp_path / "adapter", trainable=True)
    assert {key.split(".")[-3] for key, p in loaded.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_add_adapter_takes_a_decoder_without_an_adapter(tmp_path: Path) -> None:
    decoder = fresh("llama")
    model = lora.add_adapter(decoder, peft_config("LoRA"))
    lora.save_adapter(model, tmp_path / "a")
    for again in (lambda x: lora.add_adapter(x, peft_config("LoRA")), lambda x: lora.load_adapter(x, tmp_path / "a")):
        with pytest.raises(UsageError, match=r"has an adapter already; lora\.merge_adapter it, or load"):
            again(decoder)
        with pytest.raises(UsageError, match=r"decoder: give a decoder without an adapter, such as model\.decoder"):
            again(LanguageModel(decoder, build_byte_tokenizer()))
    assert torch.equal(our_logits(lora.load_adapter(fresh("llama"), tmp_path / "a")), our_logits(model))
    lora.add_adapter(lora.merge_adapter(model), peft_config("LoRA"))


def test_disabled_adapter_equals_the_base_model() -> None:
    base = our_logits(fresh("gpt2"))
    model = lora.add_adapter(fresh("gpt2"), peft_config("token rows"))
    train_adapter(model, our_logits)
    assert error(our_logits(model), base) > 1e-2
    with model.disable_adapter():
        assert torch.equal(our_logits(model), base)


def save_new_adapter(folder: Path, decoder: Decoder, targets: Any = "all-linear", kind: str = "LoRA") -> Path:
    lora.save_adapter(lora.add_adapter(decoder, peft_config(kind, targets)), folder)
    return folder


UNSLOTH_PATTERN = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp|ffn).*?(?:q_proj|v_proj|o_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp|ffn)\.(?:(?:q_proj|v_proj)))"
)
PUBLISHED_KEYS: dict[str, dict[str, Any]] = {  # what versions of peft, and unsloth, write beside the usual keys
    "peft 0.2": {"merge_weights": False, "enable_lora": None, "layers_pattern": None},
    "peft 0.10": {
        "loftq_config": {}, "megatron_config": None, "megatron_core": "megatron.core", "rank_pattern": {},
        "layer_replication": None, "use_dora": False, "use_rslora": False, "revision": None,
    },
    "peft 0.18": {
        "alora_invocation_tokens": None, "arrow_config": None, "corda_config": None, "eva_config": None,
        "ensure_weight_tying": False, "target_parameters": None, "peft_version": "0.18.0", "qalora_group_size": 16,
    },
    "unsloth": {
        "auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True},
        "target_modules": UNSLOTH_PATTERN,
    },
    "unknown keys": {"a_later_key": {"limit": float("inf")}},
}  # fmt: skip


@pytest.mark.parametrize("keys", PUBLISHED_KEYS.values(), ids=PUBLISHED_KEYS)
def test_load_adapter_reads_what_other_versions_write(keys: dict[str, Any], tmp_path: Path) -> None:
    adapter, model = tmp_path / "adapter", lora.add_adapter(fresh("llama"), peft_config("LoRA", ["q_proj", "v_proj"]))
    expected = train_adapter(model, our_logits)
    lora.save_adapter(model, adapter)
    usual = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "task_type", "bias", "fan_in_fan_out")
    config = json.loads((adapter / "adapter_config.json").read_text())
    written = {key: config[key] for key in usual} | {"base_model_name_or_path": "meta-llama/Llama-2-7b-hf"} | keys
    (adapter / "adapter_config.json").write_text(json.dumps(written))
    assert torch.equal(our_logits(lora.load_adapter(fresh("llama"), adapter)), expected)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["o_proj"], ["down_proj"]])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 3, "sliding_windows": (None,) * 3, "attention_scales": (0.25,) * 3},
        {"num_hidden_layers": 1, "sliding_windows": (None,), "attention_scales": (0.25,)},
        {"hidden_size": 40},
    ],
)
def test_load_adapter_of_another_size(tmp_path: Path, targets: Any, changes: dict[str, Any]) -> None:
    folder, decoder = save_new_adapter(tmp_path / "a", fresh("llama", **changes), targets), fresh("llama")
    before = decoder.state_dict().keys()
    with pytest.raises(InputError, match="does not fit its settings and this llama of width 48 and 2 layers"):
        lora.load_adapter(decoder, folder)
    assert decoder.state_dict().keys() == before


def test_load_adapter_of_another_family_or_other_heads(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not fit its settings and this llama"):
        lora.load_adapter(fresh("llama"), save_new_adapter(tmp_path / "a", fresh("opt"), ["q_proj"]))
    with pytest.raises(InputError, match="target q_proj: no such module in this gpt2"):
        lora.load_adapter(fresh("gpt2"), save_new_adapter(tmp_path / "d", fresh("llama"), ["q_proj"]))
    with pytest.raises(
        InputError, match=r"does not fit its settings .*: 2 tensors, first .*k_proj\.lora_B\.weight: \[32, 4\]"
    ):
        lora.load_adapter(
            fresh("llama", num_key_value_heads=1), save_new_adapter(tmp_path / "b", fresh("llama"), ["k_proj"])
        )
    lora.load_adapter(fresh("mistral"), save_new_adapter(tmp_path / "c", fresh("llama")))  # same names and shapes


def test_adapter_of_some_layers(tmp_path: Path) -> None:
    some = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0])
    lora.save_adapter(lora.add_adapter(fresh("llama"), some), tmp_path / "a")
    config: Any = lora.load_adapter(fresh("llama"), tmp_path / "a").peft_config["default"]
    assert config.layers_to_transform == [0]


REFUSED = [
    ({"target_modules": ["q_prj"]}, "target q_prj: no such module in this llama; did you mean q_proj?"),
    ({"target_modules": ["v_proj", "fc1"]}, "target fc1: no such module in this llama; did you mean"),
    ({"target_modules": []}, "target_modules is empty; all-linear, or some of down_proj, gate_proj, k_proj,"),
    ({"target_modules": r".*\.query"}, r'target_modules ".*\\.query" fits no module; the first is lm_head'),
    ({"init_lora_weights": "pissa"}, 'init_lora_weights "pissa" changes the base model'),
    ({"layer_replication": [(0, 2), (1, 2)]}, "layer_replication is not supported"),
    ({"modules_to_save": ["mlp"]}, "modules_to_save: model.layers.0.mlp has several layers; name the layers"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_add_adapter_invalid_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        lora.add_adapter(fresh("llama"), LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **changes}))
    assert message in str(caught.value)


def test_target_modules_pattern() -> None:
    model = lora.add_adapter(fresh("llama"), LoraConfig(r=2, target_modules=r".*\.1\.self_attn\.[qv]_proj"))
    assert len([key for key, _ in model.named_parameters() if "lora_A" in key]) == 2


@pytest.mark.parametrize("name", ["embed_tokens", "model.embed_tokens"])
def test_embedding_in_modules_to_save_needs_untied_head(name: str, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[name])
    with pytest.raises(InputError, match=r"this model's head is tied to it; use trainable_token_indices$"):
        lora.add_adapter(fresh("llama", tie_word_embeddings=True), config)
    model = lora.add_adapter(fresh("llama"), config)
    logits = train_adapter(model, our_logits)
    lora.save_adapter(model, tmp_path / "a")
    assert error(our_logits(lora.load_adapter(fresh("llama"), tmp_path / "a")), logits) <= FLOAT32


EMBEDDING_OPTIONS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": r".*(embed_tokens|lm_head|q_proj)"},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
]


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("options", "save_base"),
    [
        *((options, "auto") for options in EMBEDDING_OPTIONS),
        # auto saves no base weights of modules_to_save either
        *(
            pytest.param(o, False, marks=[pytest.mark.slow] if "modules_to_save" in o else [])
            for o in EMBEDDING_OPTIONS
        ),
    ],
)
def test_peft_adapter_of_embedding_and_head_loads_and_merges(
    options: dict[str, Any], tied: bool, save_base: Any, tmp_path: Path
) -> None:
    """peft keeps a tied head and the embedding apart, in logits but not when it merges."""
    fresh("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, task_type="CAUSAL_LM", **options)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    logits = train_adapter(model, hf_logits)
    model.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=save_base)
    loaded = lora.load_adapter(Decoder.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert error(our_logits(loaded), logits) <= FLOAT32
    lora.merge_adapter(loaded).save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not merged.config.tie_word_embeddings
    assert error(hf_logits(merged), logits) <= FLOAT32


@pytest.mark.parametrize(
    ("targets", "tensor"), [(["q_proj", "embed_tokens"], "embed_tokens.base_layer"), (["q_proj"], "embed_tokens")]
)
def test_peft_adapter_brings_the_embedding_that_it_was_trained_on(
    targets: list[str], tensor: str, tmp_path: Path
) -> None:
    """peft saves and loads base weights of a targeted embedding, and all of them on request."""
    fresh("llama").save_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] += 1.0
    logits = train_adapter(model, hf_logits)
    model.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    loaded = lora.load_adapter(Decoder.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert error(our_logits(loaded), logits) <= FLOAT32
    with pytest.raises(
        InputError, match=rf"{tensor}\.weight: \[97, 48\], expected nothing|lm_head\.weight: \[97, 48\]"
    ):
        lora.load_adapter(fresh("llama", vocab_size=100), tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|embedding layers):UserWarning")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"trainable_token_indices": [97, 98]}, {"modules_to_save": ["embed_tokens", "lm_head"]}]
)
def test_peft_adapter_of_a_vocabulary_with_new_tokens(options: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    """peft saves embedding and head with the adapter, under names that depend on the options."""
    fresh("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(99)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options))
    logits = train_adapter(adapted, hf_logits)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    loaded = lora.load_adapter(Decoder.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert our_logits(loaded).shape == logits.shape == (2, 6, 99)
    assert error(our_logits(loaded), logits) <= FLOAT32
    assert error(our_logits(lora.merge_adapter(loaded)), logits) <= FLOAT32


def test_load_adapter_invalid_folders(tmp_path: Path) -> None:
    folder = save_new_adapter(tmp_path / "a", fresh("llama"), ["q_proj"])
    with pytest.raises(BusyError, match="exists and is not empty"):
        save_new_adapter(folder, fresh("llama"))
    weights = folder / lora.ADAPTER_WEIGHTS_FILE
    tensors = dict(atomic.open_tensors(weights, safetensors_header.read_safetensors_header(weights).tensors))
    first = min(tensors)
    (folder / lora.ADAPTER_WEIGHTS_FILE).unlink()
    with pytest.raises(
        InputError, match=r"has adapter_config.json but no adapter_model.safetensors; was the download cut\?"
    ):
        lora.load_adapter(fresh("llama"), folder)
    (folder / lora.ADAPTER_PICKLE_FILE).write_bytes(b"\x80\x04")
    with pytest.raises(
        UnsafeFileError, match=r"^adapter_model.bin is a pickle and can run code; not opened\. Save it as safetensors"
    ):
        lora.load_adapter(fresh("llama"), folder)
    save_tensors(folder / lora.ADAPTER_WEIGHTS_FILE, {key: x for key, x in tensors.items() if key != first}, {})
    with pytest.raises(InputError, match=rf"1 tensors, first {first}: nothing, expected \[4, 48\]$"):
        lora.load_adapter(fresh("llama"), folder)
    (folder / lora.ADAPTER_WEIGHTS_FILE).unlink()
    save_file({**tensors, first: tensors[first] / 0}, folder / lora.ADAPTER_WEIGHTS_FILE)
    with pytest.raises(NonFiniteError, match="not finite, first at"):
        lora.load_adapter(fresh("llama"), folder)
    file = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(file | {"peft_type": "IA3"}))
    with pytest.raises(InputError, match=r'^adapter_config.json: peft_type "IA3"; known: LORA, also as rsLoRA, DoRA'):
        lora.load_adapter(fresh("llama"), folder)
    (folder / ADAPTER_CONFIG_FILE).unlink()
    with pytest.raises(InputError, match=r"^no adapter_config.json in "):
        lora.load_adapter(fresh("llama"), folder)
