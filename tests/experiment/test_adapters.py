"""Adapters: trained here and read by transformers with peft, and the other way round; merged; what is refused."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from laconic.errors import BusyError, InputError, NonFiniteError, UnsafeFileError
from laconic.experiment import lora
from laconic.models.decoder import Decoder
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
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),  # peft, of GPT-2's maps in transformers
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def optional() -> None:
    needs("transformers")
    needs("peft")


def settings(kind: str, targets: Any = "all-linear") -> "LoraConfig":
    return LoraConfig(r=4, target_modules=targets, **KINDS[kind])


def ours(model: "Decoder | PeftModel") -> Tensor:
    return model.logits(model(model.embed(IDS)).hidden)


def theirs(model: nn.Module) -> Tensor:
    return model(input_ids=IDS).logits


def trained(model: "PeftModel", logits: Callable[[Any], Tensor]) -> Tensor:
    """Four steps of predicting the next id, every adapter weight moved; the logits after them."""
    generator = torch.Generator().manual_seed(3)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(learning, 1e-2), []
    for _ in range(4):
        loss = nn.functional.cross_entropy(logits(model)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        for p in learning:
            p += 0.05 * torch.randn(p.shape, generator=generator)
    return logits(model.eval()).detach()


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of each family, as transformers loads it; GPT-2 and OPT tied, and Qwen 2 as well."""
    decoder = fresh(request.param, **({"tie_word_embeddings": True} if request.param == "qwen2" else {}))
    decoder.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("kind", KINDS)
def test_trained_here_read_there_and_merged(folder: Path, kind: str) -> None:
    base = ours(Decoder.from_pretrained(folder))
    model = lora.add_adapter(Decoder.from_pretrained(folder), settings(kind))
    assert error(ours(model), base) == 0 or kind == "DoRA"
    logits = trained(model, ours)
    assert error(logits, base) > 1e-2
    lora.save_adapter(model, folder.parent / "adapter")
    said = json.loads((folder.parent / "adapter" / "adapter_config.json").read_text())
    assert (said["task_type"], said["base_model_name_or_path"]) == ("CAUSAL_LM", str(folder))
    there = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), folder.parent / "adapter").eval()
    assert error(theirs(there), logits) <= FLOAT32
    again = lora.load_adapter(Decoder.from_pretrained(folder), folder.parent / "adapter")
    assert error(ours(again), logits) == 0
    assert not any(p.requires_grad for p in again.parameters())

    plain = lora.merge_adapter(model)
    assert error(ours(plain), logits) <= FLOAT32
    kept = {name: (type(module), p.shape) for name, module in plain.named_modules() for p in module.parameters(False)}
    asked = Decoder.from_pretrained(folder)
    assert kept == {n: (type(module), p.shape) for n, module in asked.named_modules() for p in module.parameters(False)}
    assert plain.state_dict().keys() == asked.state_dict().keys()
    assert all(p.requires_grad for p in plain.parameters())
    assert plain.fingerprint != asked.fingerprint
    plain.save_pretrained(folder.parent / "merged")
    assert error(theirs(AutoModelForCausalLM.from_pretrained(folder.parent / "merged").eval()), logits) <= FLOAT32
    assert Decoder.from_pretrained(folder.parent / "merged").fingerprint == plain.fingerprint


@pytest.mark.parametrize("kind", ["rsLoRA", "DoRA", "token rows"])  # rsLoRA is LoRA on another scale
def test_trained_there_read_here(folder: Path, kind: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder)
    asked = settings(kind)
    asked.task_type = "CAUSAL_LM"
    model = get_peft_model(reference, asked)
    logits = trained(model, theirs)
    model.save_pretrained(folder.parent / "adapter")
    here = lora.load_adapter(Decoder.from_pretrained(folder), folder.parent / "adapter")
    assert error(ours(here), logits) <= FLOAT32
    assert error(ours(lora.merge_adapter(here)), logits) <= FLOAT32


@pytest.mark.parametrize("name", FAMILIES)
def test_all_linear_is_the_maps_of_the_blocks(name: str) -> None:
    decoder = fresh(name)
    maps = {key for key, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    model = lora.add_adapter(decoder, settings("LoRA"))
    wrapped = {key.removesuffix(".base_layer") for key, _ in decoder.named_modules() if key.endswith(".base_layer")}
    assert wrapped == maps - {"lm_head"}
    assert {p.requires_grad for key, p in model.named_parameters() if "lora_" not in key} == {False}


def test_an_adapter_stays_float32_on_a_bfloat16_base_and_may_be_trained_on(tmp_path: Path) -> None:
    model = lora.add_adapter(fresh("llama").bfloat16(), settings("LoRA"))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    lora.save_adapter(model, tmp_path / "adapter")
    again = lora.load_adapter(fresh("llama"), tmp_path / "adapter", trainable=True)
    assert {key.split(".")[-3] for key, p in again.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_disabled_it_is_the_base() -> None:
    base = ours(fresh("gpt2"))
    model = lora.add_adapter(fresh("gpt2"), settings("token rows"))
    trained(model, ours)
    assert error(ours(model), base) > 1e-2
    with model.disable_adapter():
        assert torch.equal(ours(model), base)


def saved(folder: Path, decoder: Decoder, targets: Any = "all-linear", kind: str = "LoRA") -> Path:
    lora.save_adapter(lora.add_adapter(decoder, settings(kind, targets)), folder)
    return folder


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["o_proj"], ["down_proj"]])
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"num_hidden_layers": 3, "windows": (None,) * 3, "score_scale": (0.25,) * 3}, "llama 48 × 3"),
        ({"num_hidden_layers": 1, "windows": (None,), "score_scale": (0.25,)}, "llama 48 × 1"),
        ({"hidden_size": 40}, "llama 40 × 2"),
    ],
)
def test_an_adapter_of_another_size(tmp_path: Path, targets: Any, other: dict[str, Any], named: str) -> None:
    folder, decoder = saved(tmp_path / "a", fresh("llama", **other), targets), fresh("llama")
    before = decoder.state_dict().keys()
    with pytest.raises(InputError, match=rf"^adapter is for {named}, this is llama 48 × 2$"):
        lora.load_adapter(decoder, folder)
    assert decoder.state_dict().keys() == before


def test_an_adapter_of_another_family_or_with_other_heads(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^adapter is for opt 48 × 2, this is llama 48 × 2$"):
        lora.load_adapter(fresh("llama"), saved(tmp_path / "a", fresh("opt"), ["q_proj"]))
    with pytest.raises(InputError, match=r"^adapter is for llama 48 × 2, this is gpt2 48 × 2$"):
        lora.load_adapter(fresh("gpt2"), saved(tmp_path / "d", fresh("llama"), ["q_proj"]))
    with pytest.raises(
        InputError, match=r"does not fit its settings: 2 tensors, first .*k_proj\.lora_B\.weight: \[32, 4\]"
    ):
        lora.load_adapter(fresh("llama", num_key_value_heads=1), saved(tmp_path / "b", fresh("llama"), ["k_proj"]))
    lora.load_adapter(fresh("mistral"), saved(tmp_path / "c", fresh("llama")))  # same names, same sizes


def test_an_adapter_of_some_layers(tmp_path: Path) -> None:
    some = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0])
    lora.save_adapter(lora.add_adapter(fresh("llama"), some), tmp_path / "a")
    assert lora.load_adapter(fresh("llama"), tmp_path / "a").peft_config["default"].layers_to_transform == [0]


REFUSED = [
    ({"target_modules": ["q_prj"]}, "target q_prj: no such module; did you mean q_proj?"),
    ({"target_modules": ["v_proj", "fc1"]}, "target fc1: no such module; did you mean"),
    ({"target_modules": []}, "target_modules is empty; all-linear, or some of down_proj, gate_proj, k_proj,"),
    ({"target_modules": r".*\.query"}, r"target_modules '.*\\.query' fits no module; the first is lm_head"),
    ({"init_lora_weights": "pissa"}, 'init_lora_weights "pissa" changes the base model'),
    ({"layer_replication": [(0, 2), (1, 2)]}, "layer_replication is not known here; leave it out"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_settings_that_cannot_be_meant(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        lora.add_adapter(fresh("llama"), LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **changes}))
    assert message in str(caught.value)


def test_a_pattern_is_a_target() -> None:
    model = lora.add_adapter(fresh("llama"), LoraConfig(r=2, target_modules=r".*\.1\.self_attn\.[qv]_proj"))
    assert len([key for key, _ in model.named_parameters() if "lora_A" in key]) == 2


@pytest.mark.parametrize("name", ["embed_tokens", "model.embed_tokens"])
def test_a_whole_embedding_is_saved_only_where_the_head_is_its_own(name: str, tmp_path: Path) -> None:
    asked = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[name])
    with pytest.raises(InputError, match=r"this model's head is tied to it, .*use trainable_token_indices$"):
        lora.add_adapter(fresh("llama", tie_word_embeddings=True), asked)
    model = lora.add_adapter(fresh("llama"), asked)
    logits = trained(model, ours)
    lora.save_adapter(model, tmp_path / "a")
    assert error(ours(lora.load_adapter(fresh("llama"), tmp_path / "a")), logits) <= FLOAT32


def test_folders_that_are_no_adapter(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", fresh("llama"), ["q_proj"])
    with pytest.raises(BusyError, match="exists and is not empty"):
        saved(folder, fresh("llama"))
    tensors = dict(
        lora.artifact.open_tensors(
            folder / lora.ADAPTER_WEIGHTS_FILE,
            lora.artifact.read_safetensors_header(folder / lora.ADAPTER_WEIGHTS_FILE).tensors,
        )
    )
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
    with pytest.raises(InputError, match=rf"1 tensors, first {first}: nothing, asked is \[4, 48\]$"):
        lora.load_adapter(fresh("llama"), folder)
    (folder / lora.ADAPTER_WEIGHTS_FILE).unlink()
    save_file({**tensors, first: tensors[first] / 0}, folder / lora.ADAPTER_WEIGHTS_FILE)
    with pytest.raises(NonFiniteError, match="not finite, first at"):
        lora.load_adapter(fresh("llama"), folder)
    file = json.loads((folder / lora.ADAPTER_CONFIG_FILE).read_text())
    (folder / lora.ADAPTER_CONFIG_FILE).write_text(json.dumps(file | {"peft_type": "IA3"}))
    with pytest.raises(InputError, match=r'^adapter_config.json: peft_type "IA3"; known: LORA, also as rsLoRA, DoRA'):
        lora.load_adapter(fresh("llama"), folder)
    (folder / lora.ADAPTER_CONFIG_FILE).unlink()
    with pytest.raises(InputError, match=r"^no adapter_config.json in "):
        lora.load_adapter(fresh("llama"), folder)
