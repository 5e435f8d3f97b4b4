"""adapter_config.json of strangers: no code runs, no pattern hangs, and invalid values give one line."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from laconic.errors import InputError, UnsafeFileError
from laconic.experiment.lora import adapter_config, lora
from laconic.experiment.lora.adapter_config import ADAPTER_CONFIG_FILE, match_modules, read_adapter_config
from laconic.models.decoder import Decoder
from tests.conftest import needs
from tests.models.fixtures import fresh

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
ENDLESS = "(([a-z._0-9])*)*X"
INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "megatron": ({"megatron_config": {"a": 1}, "megatron_core": "megatron.core"}, "megatron_config is not supported"),
    "target that hangs": ({"target_modules": ENDLESS}, "takes too long to match; list the modules by name"),
    "exclusion that hangs": ({"exclude_modules": ENDLESS}, "takes too long to match"),
    "rank that hangs": ({"rank_pattern": {ENDLESS: 4}}, "takes too long to match"),
    "alpha that hangs": ({"alpha_pattern": {ENDLESS: 4}}, "takes too long to match"),
    "pattern that is invalid": ({"target_modules": "(q_proj"}, "cannot be matched: .*unterminated subpattern"),
    "pattern that is long": ({"target_modules": "(a|b)" * 5000}, "over 10,000 characters"),
    "pattern in layers_pattern": ({"layers_to_transform": [0], "layers_pattern": ENDLESS}, "layers_pattern="),
    "rank that is a text": ({"r": "4"}, 'r="4": input should be a valid integer'),
    "rank of 10^18": ({"r": 10**18}, "r=1000000000000000000: input should be less"),
    "rank of a bool": ({"r": True}, "r=true"),
    "scale that is infinite": ({"lora_alpha": float("inf")}, "lora_alpha=Infinity"),
    "targets of numbers": ({"target_modules": [1]}, "target_modules="),
    "bias": ({"bias": "some"}, 'bias="some"'),
    "token rows outside": ({"trainable_token_indices": [10**6]}, "does not fit its settings|peft cannot apply it"),
    "layers with a pattern": ({"layers_to_transform": [0], "target_modules": ".*q_proj"}, "layers_to_transform"),
    "nothing left": ({"exclude_modules": ["q_proj"]}, "peft cannot apply it"),
    "type of adapter": ({"peft_type": ["LORA"]}, r'peft_type \["LORA"\]; known: LORA'),
    "quantized": ({"use_qalora": True}, "use_qalora is not supported; train without it"),
}


@pytest.fixture(autouse=True)
def require_peft() -> None:
    needs("peft")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    from peft import LoraConfig

    settings = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])
    lora.save_adapter(lora.add_adapter(fresh("llama"), settings), tmp_path / "adapter")
    return tmp_path / "adapter"


def load_with(folder: Path, changes: dict[str, Any]) -> Decoder:
    decoder = fresh("llama")
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(PLAIN | changes))
    lora.load_adapter(decoder, folder)
    return decoder


def test_adapter_config_lists_target_modules_in_the_same_order_in_every_process(tmp_path: Path) -> None:
    from peft import LoraConfig

    names = ["v_proj", "q_proj", "up_proj", "o_proj", "down_proj", "k_proj", "gate_proj"]  # peft makes a set of them
    lora.save_adapter(lora.add_adapter(fresh("llama"), LoraConfig(r=2, target_modules=names)), tmp_path / "adapter")
    stored = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG_FILE).read_text())
    assert stored["target_modules"] == sorted(names)


@pytest.mark.medium
@pytest.mark.parametrize(("changes", "message"), INVALID.values(), ids=INVALID)
def test_load_adapter_refuses_settings(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    if "too long" in message:
        monkeypatch.setattr(adapter_config, "MATCH_SECONDS", 0.2)
    with pytest.raises(InputError, match=message) as caught:
        load_with(adapter, changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [{"a": 1}, None])
def test_load_adapter_imports_no_module_that_the_file_names(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) if config else nullcontext():
        load_with(adapter, {"megatron_config": config, "megatron_core": "megatron.core"})
    assert "megatron" not in sys.modules


def test_load_adapter_refuses_a_link_out_of_its_folder(adapter: Path, tmp_path: Path) -> None:
    (adapter / ADAPTER_CONFIG_FILE).rename(tmp_path / "elsewhere.json")
    (adapter / ADAPTER_CONFIG_FILE).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(UnsafeFileError, match="leads out of its folder"):
        read_adapter_config(adapter)


def test_add_adapter_patterns_choose_the_modules_that_peft_chooses() -> None:
    from peft import LoraConfig, get_peft_model

    patterns: dict[str, Any] = {
        "target_modules": r".*\.(q|v|o)_proj",
        "exclude_modules": r".*\.0\..*\.o_proj",
        "rank_pattern": {r"layers\.1\..*q_proj": 3, "v_proj": 5, r".*_proj": 7},
        "alpha_pattern": {r"[qv]_proj": 2},
    }
    ours = lora.add_adapter(fresh("llama"), LoraConfig(r=2, **patterns))
    theirs: Any = get_peft_model(fresh("llama"), LoraConfig(r=2, **patterns))
    assert {name: p.shape for name, p in ours.named_parameters()} == {
        name: p.shape for name, p in theirs.named_parameters()
    }
    scales = [
        {name: module.scaling for name, module in model.named_modules() if hasattr(module, "scaling")}
        for model in (ours, theirs)
    ]
    assert scales[0] == scales[1]
    assert scales[0]


def test_match_modules_matches_whole_names() -> None:
    assert match_modules([".*b", "a"], ["a", "ab", "abc"]) == [["ab"], ["a"]]
