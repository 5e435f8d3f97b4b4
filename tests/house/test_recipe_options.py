"""An option exists because someone uses it: recipe keys that no shipped recipe sets are listed here with a reason."""

import tomllib

from laconic.config.load import SHIPPED_RECIPES
from laconic.config.recipe_keys import flatten, leaf_keys

ROWS = "size of a synthetic split, small in tests"
TASK = "difficulty of a synthetic task"
FILES = "describes the user's own files"
RUN = "choice of the machine or of the user, not of a method"
PAPER = "hyperparameter of an equation in the ledger"
ABLATION = "part of an ablation of docs/results.md or of a recipe's comment"
UNUSED_KEYS: dict[str, tuple[str, ...]] = {
    RUN: (
        "deviations", "model.revision", "model.init_seed", "data.revision", "data.max_train_rows",
        "validation.with_cot",
        "train.parallel", "train.reshard", "train.eps", "train.activation_checkpointing",
        "compression.checkpoint_segments", "train.deterministic", "train.on_nonfinite",
        "inner_loop.truncate_after", "train.keep_every",
        "train.keep_best", "train.log_every", "method_options",
    ),
    FILES: (
        "data.test", "data.size_check", "data.text.text_field", "data.text.document_field",
        "data.text.held_out_fraction", "data.chain_field", "data.columns", "data.on_invalid_row",
        "data.allow_contamination",
    ),
    ROWS: tuple(
        f"data.{task}.{split}_rows"
        for task in ("digits", "recall", "mqar", "copying", "continual_translation", "formal_languages")
        for split in ("train", "valid", "test")
        if (task, split) != ("digits", "train")
    ),
    TASK: (
        "data.digits.step_end", "data.recall.segment_tokens", "data.recall.num_facts", "data.recall.num_keys",
        "data.recall.num_values", "data.recall.num_fillers", "data.recall.num_queries", "data.recall.num_segments",
        "data.recall.two_token_facts", "data.recall.segments_per_window", "data.recall.segment_overlap",
        "data.mqar.num_keys", "data.mqar.num_values", "data.mqar.tokens_per_key", "data.copying.num_copied",
        "data.copying.row_tokens", "data.copying.num_values",
    ),
    PAPER: (
        "distillation.student_ce_weight", "distillation.teacher_ce_weight",  # CODI, eq. 5
        "stop_head.stop_quantile", "stop_head.stop_threshold", "stop_head.head_only_after",
        "stop_head.initial_mean_fraction",  # VL13
        "mixer.self_modifying.max_memory_norm",
        "mixer.titans.decay_half_life", "mixer.titans.mlp_width", "mixer.titans.lr_init",
        "mixer.titans.num_persistent_tokens",  # Titans, eq. 19
        "cms.residual", "cms.lr_granularity", "cms.associative_target", "cms.max_error_norm",
    ),
    ABLATION: (
        "mixer.self_modifying.adaptive_projections", "inner_loop.allow_untrained_level",
    ),
}  # fmt: skip


def test_every_recipe_key_is_set_by_a_shipped_recipe_or_listed_with_a_reason() -> None:
    used = {key for path in SHIPPED_RECIPES.glob("*.toml") for key in flatten(tomllib.loads(path.read_text()))}
    unused = {key for key in leaf_keys() if key not in used}
    listed = {key for keys in UNUSED_KEYS.values() for key in keys}
    assert sorted(unused - listed) == [], "set the key in a shipped recipe, remove the option, or list it with a reason"
    assert sorted(listed - unused) == [], "a listed key is set by a recipe or no longer exists"
