"""Combinations of a method with several ranks that cannot work. Nothing here imports torch."""

from laconic.config.methods import CoconutConfig, CompressionConfig
from laconic.config.training import TrainingConfig


def find_parallel_conflict(
    method: str, train: TrainingConfig, compression: CompressionConfig | None, coconut: CoconutConfig | None
) -> str | None:
    """Return why a method cannot be trained with `parallel` and `reshard` of a recipe, or None.

    With FSDP2 ranks exchange weights and gradients in their passes, so all must run equally many.
    """
    if train.parallel == "fsdp" and (cause := find_unequal_passes(method, compression, coconut)):
        return f'train.parallel "fsdp": with {cause} ranks run unequal numbers of passes and would deadlock; use "ddp"'
    if train.reshard and method == "hope":
        return "train.reshard: method hope uses the weights of all blocks in the whole pass; remove the key"
    return None


def find_unequal_passes(
    method: str, compression: CompressionConfig | None, coconut: CoconutConfig | None
) -> str | None:
    """Return the setting that lets the number of passes depend on the rows, or None."""
    if method == "autocompressor" and compression is not None:
        if compression.summary == "autoregressive" and compression.length_policy != "fixed":
            return f'length_policy "{compression.length_policy}"'
        if compression.memory_policy == "budgeted":
            return 'memory_policy "budgeted"'
    if method == "coconut" and coconut is not None:
        if not coconut.pad_latent_to_max:
            return "pad_latent_to_max false"
        if coconut.uniform_stage_prob:
            return f"uniform_stage_prob {coconut.uniform_stage_prob:g}"
    return None
