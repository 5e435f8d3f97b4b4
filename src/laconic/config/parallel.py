"""Combinations of a method with several ranks that cannot work. Nothing here imports torch."""

from laconic.config.methods import CompressionConfig
from laconic.config.training import TrainingConfig


def find_parallel_conflict(method: str, train: TrainingConfig, compression: CompressionConfig | None) -> str | None:
    """Return why a method cannot be trained with `parallel` and `reshard` of a recipe, or None.

    With FSDP2 ranks exchange weights and gradients in their passes, so all must run equally many.
    """
    if method == "autocompressor" and compression is not None and train.parallel == "fsdp":
        has_unequal_passes = compression.summary == "autoregressive" and compression.length_policy != "fixed"
        if has_unequal_passes or compression.memory_policy == "budgeted":
            policy = "length_policy" if has_unequal_passes else "memory_policy"
            return (
                f'train.parallel "fsdp": with {policy} "{getattr(compression, policy)}" ranks run unequal numbers of '
                'passes and would deadlock; use "ddp"'
            )
    if train.reshard and method == "coconut":
        return (
            "train.reshard: method coconut runs as many passes as a rank's rows have steps, so ranks would deadlock; "
            "remove the key"
        )
    if train.reshard and method == "hope":
        return "train.reshard: method hope uses the weights of all blocks in the whole pass; remove the key"
    return None
