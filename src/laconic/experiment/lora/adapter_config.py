"""Read the adapter_config.json of a LoRA adapter: only known keys of known types reach peft.

peft would import a module that the file names (`megatron_core`) and match regular expressions without a limit on time.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from laconic.errors import InputError
from laconic.models.checkpoints.hf_config import validate_object
from laconic.models.checkpoints.hf_fields import JsonModel, Probability
from laconic.storage import file_names, strict_json
from laconic.storage.strict_json import abbreviate

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER_CONFIG_FILE = "adapter_config.json"
UNSUPPORTED_OPTIONS = (  # these change the forward pass
    "layer_replication",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "megatron_config",
)
PLAIN_NAME = re.compile(r"[\w.]*")
MAX_PATTERN_LENGTH = 10_000
MATCH_SECONDS = 5  # for all names of a model; real patterns take milliseconds
MATCH_PROGRAM = """
import json, re, sys
patterns, names = json.load(sys.stdin)
json.dump([[name for name in names if re.fullmatch(pattern, name)] for pattern in patterns], sys.stdout)
"""

Rank = Annotated[int, Field(gt=0, le=2**20)]
TokenIndices = list[Annotated[int, Field(ge=0, lt=2**31)]]
PlainName = Annotated[str, Field(pattern=r"^[\w.]*$")]


class AdapterKeys(JsonModel):
    """Keys of adapter_config.json that decide what an adapter computes, with peft's defaults."""

    r: Rank = 8
    lora_alpha: PositiveFloat = 8
    lora_dropout: Probability = 0.0
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    bias: Literal["none", "all", "lora_only"] = "none"
    lora_bias: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | str = True
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[PlainName] | PlainName | None = None
    rank_pattern: dict[str, Rank] = Field(default_factory=dict)
    alpha_pattern: dict[str, PositiveFloat] = Field(default_factory=dict)
    trainable_token_indices: TokenIndices | dict[str, TokenIndices] | None = None
    ensure_weight_tying: bool = False


def read_adapter_config(folder: Path) -> "LoraConfig":
    """Read the adapter_config.json of a folder; LoRA and its variants are supported. Unknown keys are ignored."""
    from peft import LoraConfig

    file = strict_json.read_foreign_json(file_names.resolve_inside(folder, ADAPTER_CONFIG_FILE))
    kind = file.get("peft_type")
    if kind != "LORA":
        hint = "; a cartridge is a memory of its base model: give it as memory" if kind == "PREFIX_TUNING" else ""
        raise InputError(
            f"{ADAPTER_CONFIG_FILE}: peft_type {abbreviate(kind)}; known: LORA, also as rsLoRA, DoRA, with token "
            f"rows{hint}"
        )
    check_supported(file)
    keys = validate_object(AdapterKeys, file, f"{ADAPTER_CONFIG_FILE}: ")
    try:
        return LoraConfig(**{name: getattr(keys, name) for name in AdapterKeys.model_fields})
    except (TypeError, ValueError) as error:  # options that peft does not combine
        raise InputError(f"{ADAPTER_CONFIG_FILE}: {error}") from None


def read_base_model(path_or_name: str | Path) -> str | None:
    """Return the base model that the folder of a peft adapter names; None for anything else.

    A relative path is resolved as peft does it, against the working directory, or else against the adapter's folder.
    """
    folder = Path(os.path.expanduser(path_or_name))
    if (folder / "config.json").exists() or not (folder / ADAPTER_CONFIG_FILE).is_file():
        return None
    base = strict_json.read_foreign_json(file_names.resolve_inside(folder, ADAPTER_CONFIG_FILE)).get(
        "base_model_name_or_path"
    )
    if not isinstance(base, str) or not base:
        return None
    beside = folder / base
    return str(beside) if not Path(base).exists() and beside.is_dir() else base


def check_supported(options: Mapping[str, Any]) -> None:
    """Raise InputError for an option that is switched on and not implemented."""
    unsupported = next((name for name in UNSUPPORTED_OPTIONS if options.get(name)), None)
    if unsupported:
        raise InputError(f"{unsupported} is not supported; train without it, or merge the adapter with peft")


def match_modules(patterns: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Return the names that each regular expression matches as a whole.

    Patterns come from strangers, and some never end; a child process with a limit on time matches them.
    """
    shortened = " ".join(abbreviate(pattern) for pattern in patterns[:3])
    if any(len(pattern) > MAX_PATTERN_LENGTH for pattern in patterns):
        raise InputError(f"pattern {shortened} has over {MAX_PATTERN_LENGTH:,} characters; list the modules by name")
    command = [sys.executable, "-I", "-S", "-c", MATCH_PROGRAM]
    task = json.dumps([list(patterns), list(names)])
    try:
        child = subprocess.run(command, input=task, capture_output=True, text=True, timeout=MATCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"pattern {shortened} takes too long to match; list the modules by name") from None
    if child.returncode:
        reason = next(iter(child.stderr.splitlines()[-1:]), f"it ended with {child.returncode}")
        raise InputError(f"pattern {shortened} cannot be matched: {abbreviate(reason)}; list the modules by name")
    return json.loads(child.stdout)


def expand_pattern_keys(table: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Replace the keys of `rank_pattern` or `alpha_pattern` that are regular expressions by the names they match.

    peft applies the first key that matches the end of a name.
    """
    patterns = [key for key in table if not PLAIN_NAME.fullmatch(key)]
    if not patterns:
        return dict(table)
    matches = dict(zip(patterns, match_modules([rf"(.*\.)?({key})" for key in patterns], names), strict=True))
    expanded: dict[str, Any] = {}
    for key, value in table.items():
        for name in matches.get(key, [key]):
            expanded.setdefault(name, value)
    return expanded
