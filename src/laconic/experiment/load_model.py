"""`laconic.load`: open a checkpoint or a run as the object that its users need."""

import os
from pathlib import Path
from typing import Literal

import torch

from laconic.compression.autocompressor import AutoCompressor
from laconic.config.load import SHIPPED_RECIPES
from laconic.data.tokenizer import Tokenizer, load_tokenizer
from laconic.errors import InputError, UsageError, name_folder_in_errors
from laconic.experiment.from_recipe.build_nested import model_class, read_saved_config
from laconic.experiment.load_autocompressor import is_published_compressor, load_published_compressor
from laconic.experiment.load_run import RECIPE_FILE, LoadedRun, RunStep, find_run, is_export, is_run_dir, load_run
from laconic.experiment.lora import lora
from laconic.experiment.lora.adapter_config import ADAPTER_CONFIG_FILE, read_base_model
from laconic.experiment.text_models.compressor import TextCompressor, as_compressor
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.generation.config import check_type
from laconic.interfaces import AnswersQuestions
from laconic.models.checkpoints import weights
from laconic.models.decoder import Decoder
from laconic.models.quantize import quantize_decoder
from laconic.nested.hope.model import Hope
from laconic.storage.manifest import MANIFEST_FILE

LoadedModel = LanguageModel | Reasoner | TextCompressor | NestedTextModel


def load(
    path_or_name: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    step: int | None = None,
    revision: str | None = None,
    allow_code: bool = False,
    quantize: Literal["int8"] | None = None,
    allow_missing: tuple[str, ...] = (),
) -> LoadedModel:
    """Load a checkpoint or a trained run.

    What is opened decides the class, which `isinstance` tells, and the methods besides `generate`:

    - `LanguageModel`: a checkpoint (folder, hub name, `.gguf`), a run of lm, or a peft adapter that names its base.
      `compress`, `load_memory`, `save`
    - `Reasoner`: a run of cot, nocot, icot, coconut, codi, pccot or kava, or of a method of one's own that answers.
      `think`, `compress`, `stream_answers`
    - `TextCompressor`: a run of autocompressor, or a published AutoCompressor. `compress`, `load_memory`, `save`
    - `NestedTextModel`: a run of hope, or a saved nested model. `compress`, `load_memory`, `save`

    All have `generate(prompts)`, `decoder`, `tokenizer` and `recipe`. What `laconic export RUN` wrote opens as the run.

    Args:
        path_or_name: Run directory, one of its step folders, folder of a checkpoint, or name of a model.
        device: Device of the model.
        dtype: Type of a checkpoint's weights, as a torch dtype or its name; by default as
            `laconic.Decoder.from_pretrained` chooses. A run has the type of its recipe.
        step: Step of a run; by default the latest valid one.
        revision: Commit, tag or branch on the hub.
        allow_code: Import the method of a run that was trained with code outside laconic (`method =
            "package.module:Class"`). Set it only for runs that you trust.
        quantize: "int8" rounds the linear layers of a checkpoint while reading; see `laconic.quantize_decoder`.
        allow_missing: Tensors that may be missing from a checkpoint; they are then initialised at random.

    Returns:
        The model, ready to use.

    Raises:
        InputError: If there is no such model, or the run has no checkpoint.
        UsageError: For a step of a checkpoint, dtype, quantisation or revision of a run, or code that is not allowed.
        CorruptArtifactError: If a file is damaged or belongs to another model.

    Examples:
        >>> import tempfile, laconic
        >>> from laconic.data.tokenizer import build_byte_tokenizer
        >>> tokenizer = build_byte_tokenizer()
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama", vocab_size=tokenizer.vocab_size))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     laconic.LanguageModel(decoder, tokenizer).save(folder)
        ...     model = laconic.load(folder)
        >>> type(model).__name__
        'LanguageModel'
    """
    check_type("path_or_name", path_or_name, str | os.PathLike, "a folder or a name, as text or Path")
    check_type("step", step, int | None, "the number of a step")
    path_or_name = os.path.expanduser(path_or_name)
    target = weights.resolve_device(device)
    run = find_run(path_or_name, step)
    fixed = {"dtype": dtype, "quantize": quantize, "allow_missing": allow_missing or None, "revision": revision}
    if run is None:
        check_is_model(path_or_name)
        if step is not None:
            raise UsageError(f"step {step}: {path_or_name} is a checkpoint, not a run, and has no steps; remove step")
        if read_base_model(path_or_name) is not None:
            return LanguageModel(*load_plain_model(path_or_name, target, dtype, revision, quantize, allow_missing))
        folder = weights.find_checkpoint(path_or_name, weights.check_revision(path_or_name, revision))
        if not is_export(folder):
            return load_checkpoint(path_or_name, folder, target, dtype, quantize, allow_missing)
        run = RunStep(folder, None)  # on the hub, which has revisions; local ones are found as runs
        del fixed["revision"]
    for name, value in fixed.items():
        if value is not None:
            raise UsageError(f"{name} {value}: {path_or_name} is a run, which has its own; remove {name}")
    return wrap_run(load_run(run.folder, target, run.step, allow_code=allow_code).merge_for_answers())


def wrap_run(run: LoadedRun) -> LoadedModel:
    if isinstance(run.method, AutoCompressor):
        return as_compressor(run)
    if run.recipe.method == "hope":
        assert isinstance(run.parts.decoder, Hope)
        updates = run.recipe.inner_loop is None or run.recipe.inner_loop.enabled
        return NestedTextModel(run.parts.decoder, run.parts.tokenizer, updates, run.recipe)
    if not isinstance(run.method, AnswersQuestions):
        return LanguageModel(run.parts.decoder, run.parts.tokenizer, run.recipe)
    return Reasoner(run)


def load_checkpoint(
    path_or_name: str | Path,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype | str | None,
    quantize: Literal["int8"] | None,
    allow_missing: tuple[str, ...],
) -> LoadedModel:
    """Load the checkpoint in a folder: a plain decoder, a saved nested model, or a published AutoCompressor."""
    with name_folder_in_errors(folder):
        float_dtype = weights.resolve_dtype(dtype, folder)
        shape = read_saved_config(folder) if (folder / "config.json").is_file() else None
        for name, value in (("quantize", quantize), ("allow_missing", allow_missing)):
            if value and (shape is not None or is_published_compressor(folder)):
                raise UsageError(f"{name}: {path_or_name} is not a plain model; remove {name}")
        if shape is not None:
            nested = model_class(shape).from_pretrained(folder, float_dtype, device)
            return NestedTextModel(nested, load_tokenizer(folder))
        if is_published_compressor(folder):
            return load_published_compressor(folder, device, float_dtype)
    decoder, tokenizer = load_plain_model(folder, device, float_dtype, quantize=quantize, allow_missing=allow_missing)
    decoder.name_or_path = str(path_or_name)
    return LanguageModel(decoder, tokenizer)


def load_plain_model(
    path_or_name: str | Path,
    device: torch.device | str,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    quantize: Literal["int8"] | None = None,
    allow_missing: tuple[str, ...] = (),
) -> tuple[Decoder, Tokenizer]:
    """Load a decoder and its tokenizer; the folder of a peft adapter is merged into the base model that it names."""
    if (base := read_base_model(path_or_name)) is not None:
        adapter = Path(os.path.expanduser(path_or_name))
        decoder, tokenizer = load_plain_model(base, device, dtype, revision, allow_missing=allow_missing)
        with name_folder_in_errors(adapter):
            decoder = lora.merge_adapter(lora.load_adapter(decoder, adapter))
            tokenizer = load_tokenizer(adapter) if (adapter / "tokenizer.json").is_file() else tokenizer
        decoder.name_or_path = str(path_or_name)
        return (quantize_decoder(decoder) if quantize else decoder), tokenizer
    folder = weights.find_checkpoint(path_or_name, weights.check_revision(path_or_name, revision))
    with name_folder_in_errors(folder):
        decoder = Decoder.from_pretrained(folder, dtype, device, allow_missing=allow_missing, quantize=quantize)
        decoder.name_or_path = str(path_or_name)
        return decoder, load_tokenizer(decoder.source_folder or folder)


def check_is_model(path_or_name: str | Path) -> None:
    """Raise InputError for what is often mistaken for a model, with what to load instead."""
    path = Path(path_or_name)
    if path.suffix == ".safetensors" and path.is_file():
        raise InputError(f"{path} is a file of tensors; load its folder, or call load of the model that wrote it")
    if path.suffix == ".toml" or (not path.exists() and (SHIPPED_RECIPES / f"{path}.toml").is_file()):
        raise InputError(f"{path} is a recipe, not a trained run; laconic train {path} writes one")
    if not path.is_dir() or (path / "config.json").is_file():
        return
    runs = sorted(entry.name for entry in path.iterdir() if is_run_dir(entry))
    if runs:
        raise InputError(f"{path} is not a run, but holds runs; load one of them, such as {path / runs[0]}")
    if any((path / "steps").glob("step-*")) or (path / MANIFEST_FILE).is_file():
        raise InputError(
            f"{path} has checkpoints, but no {RECIPE_FILE}; load the run directory that has one, or write it with "
            "laconic.experiment.run_init.init_run(run, recipe)"
        )
    if (path / ADAPTER_CONFIG_FILE).is_file() and read_base_model(path) is None:
        raise InputError(
            f"{path} is a peft adapter that names no base model; laconic export MODEL --adapter {path} --out DIR "
            "merges it into one"
        )
