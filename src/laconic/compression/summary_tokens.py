"""Trainable parameters of an AutoCompressor: summary tokens, trigger, the map to vectors, and length heads.

AutoCompressors (arXiv:2305.14788), their variable-length variant (jo100sun/AutoCompressors bb15bc1), mean pooling
(arXiv:2510.20797), Nugget (arXiv:2310.02409).

The papers' vectors are hidden states, which a pretrained decoder has never read: their norm is many times that of
token embeddings, and before training they do more harm than no memory. With summary_init "last_tokens", an untrained
memory is the text of each segment's last tokens.

Symbols: K summary positions, D width, V vocabulary; h_j, z_t last hidden states at text token j and at summary
position t; A the map from a state to a vector; c tokens of a segment; N vectors kept.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laconic.config.methods import CompressionConfig, StopHeadConfig
from laconic.errors import UsageError
from laconic.halting.stop_distribution import StopPosition, solve_initial_bias, stop_logit, vocabulary_stop_logit
from laconic.models.attention import accumulation_dtype
from laconic.models.decoder import Decoder
from laconic.models.init import NORMAL_STD, build_seeded_linear
from laconic.storage.saved_module import SavedModule

TRIGGER_ROW, STOP_ROW = 0, 1  # rows of `control`


class SummaryParameters(SavedModule):
    """Parameters for one configuration; those that it does not use are None.

    Parameters are at least float32, whatever the decoder's dtype. None of them is a scalar, because FSDP cannot shard
    scalars. Saved files have their names: `tokens` are the summary tokens e, `start` is the trigger, `steps` its step
    embeddings, `control` the vocabulary rows of trigger and stop. `scale` and `residual` belong to the map A, `u` and
    `b` to the stop head, `ratio` to the classifier of lengths, `v` and `c` to the selection score. `r` is the mean rms
    of token embeddings.

    Args:
        stop_head_config: Settings of learned lengths; required for length_policy "stop_head" and "classifier".
        eos_token_id: Id whose embedding initialises the summary tokens, with summary_init "eos" (or None).
    """

    r: Tensor
    price_state: Tensor
    artifact_kind = "summaries"

    def __init__(
        self,
        decoder: Decoder,
        config: CompressionConfig,
        stop_head_config: StopHeadConfig | None = None,
        *,
        eos_token_id: int | None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if stop_head_config is None and config.length_policy in ("stop_head", "classifier"):
            raise UsageError(f'length_policy = "{config.length_policy}" needs the table [stop_head]')
        table = decoder.token_embedding.weight.detach()
        self.config, self.stop_head_config, self.K = config, stop_head_config, config.fixed_length
        head = None if stop_head_config is None else stop_head_config.model_dump(mode="json")
        self.settings = {"compression": config.model_dump(mode="json"), "stop_head": head}
        self.width = table.shape[1]
        dtype = accumulation_dtype(table.dtype)
        squares = [rows.to(dtype).square().mean(1) for rows in table.split(8192)]  # no float32 copy of a large table
        norm = 1.0 if table.is_meta else float(torch.cat(squares).sqrt().mean())
        self.register_buffer("r", torch.tensor(norm, dtype=dtype))
        generator = torch.Generator().manual_seed(seed)
        self.add_summary_tokens(table, eos_token_id, generator)
        summary_map = config.summary_map or ("scale" if config.summary == "autoregressive" else "none")
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype)) if summary_map == "scale" else None
        D, copies = self.width, self.copies_last_tokens
        self.residual = nn.Parameter(torch.zeros(D, D, dtype=dtype)) if copies else None
        self.add_heads(generator)
        self.to(table.device)

    def add_summary_tokens(
        self, table: Float[Tensor, "V D"], eos_token_id: int | None, generator: torch.Generator
    ) -> None:
        """Create summary tokens, or the trigger with its step embeddings, control rows, or the selection score."""
        config, D = self.config, self.width
        row = torch.zeros(D)
        if config.summary_init in ("eos", None) and config.summary in ("parallel", "autoregressive"):
            if eos_token_id is None:
                raise UsageError('summary_init = "eos", but the model has no eos token; use "normal"')
            row = row if table.is_meta else table[eos_token_id].cpu()
        has_rows = self.stop_head_config is not None and self.stop_head_config.control_tokens == "vocabulary"
        is_parallel = config.summary == "parallel"
        is_loop = config.summary == "autoregressive"
        self.control = nn.Parameter(self.init_noisy_copies(row, 2, generator)) if has_rows else None
        self.tokens = nn.Parameter(self.init_noisy_copies(row, self.K, generator)) if is_parallel else None
        if self.tokens is not None and self.copies_last_tokens:
            nn.init.zeros_(self.tokens)
        has_start = is_loop and not has_rows
        self.start = nn.Parameter(self.init_noisy_copies(row, 1, generator)[0]) if has_start else None
        has_steps = is_loop and config.step_embedding
        self.steps = nn.Parameter(torch.zeros(self.K, D, dtype=self.param_dtype)) if has_steps else None
        selects = config.summary == "select"
        self.v = nn.Parameter(self.init_noisy_copies(torch.zeros(D), 1, generator)[0]) if selects else None
        self.c = nn.Parameter(torch.zeros(1, dtype=self.param_dtype)) if selects else None

    def init_noisy_copies(self, row: Float[Tensor, " D"], n: int, generator: torch.Generator) -> Float[Tensor, "n D"]:
        noise = torch.randn(n, self.width, generator=generator, device="cpu") * NORMAL_STD
        return row.to(self.param_dtype) + noise.to(self.param_dtype)

    @property
    def copies_last_tokens(self) -> bool:
        """Whether summary tokens and vectors begin as the segment's last tokens."""
        return self.config.summary_init == "last_tokens"

    @property
    def stop_position(self) -> StopPosition:
        """What a stop at a summary position keeps, see `halting.stop_distribution`."""
        return "after" if self.stop_head_config is None else self.stop_head_config.stop_position

    @property
    def param_dtype(self) -> torch.dtype:
        return self.r.dtype

    def add_heads(self, generator: torch.Generator) -> None:
        config, head, D = self.config, self.stop_head_config, self.width
        has_stop_head = head is not None and config.length_policy == "stop_head" and head.head == "linear"
        self.u = nn.Parameter(torch.zeros(D, dtype=self.param_dtype)) if has_stop_head else None
        self.b = nn.Parameter(torch.zeros(1, dtype=self.param_dtype)) if has_stop_head else None
        self.initial_bias = 0.0
        if has_stop_head and head is not None:
            self.initial_bias = solve_initial_bias(
                head.initial_mean_fraction, config.possible_lengths, head.stop_position
            )
        self.ratio = None
        if config.length_policy == "classifier":
            self.ratio = build_seeded_linear(D, len(config.possible_lengths), generator).to(self.param_dtype)
            with torch.no_grad():
                for p in self.ratio.parameters():
                    p /= 1.0 if head is None else head.head_lr_multiplier
        price = 0.0 if head is None else head.length_cost
        # files have the price, and a mean length that no longer moves it
        self.register_buffer("price_state", torch.tensor([price, -1.0], dtype=torch.float64))

    @property
    def zero_loss(self) -> Float[Tensor, ""]:
        """0 with a graph to the heads, for a loss that would otherwise depend on no trained parameter."""
        ratio = None if self.ratio is None else self.ratio.weight
        heads = [p for p in (self.u, self.control, ratio) if p is not None]
        return sum((0.0 * p.sum() for p in heads), torch.zeros((), device=self.r.device))

    @property
    def trigger_vector(self) -> Float[Tensor, " D"]:
        """`<sum>`, a parameter of its own or a control row."""
        trigger = self.start if self.control is None else self.control[TRIGGER_ROW]
        assert trigger is not None
        return trigger

    def summary_inputs(self, n: int, last_embeds: Float[Tensor, "B n D"] | None = None) -> Float[Tensor, "*#B n D"]:
        """Return the inputs of the first `n` summary positions: e_t, added to the last tokens' embeddings if given."""
        assert self.tokens is not None
        tokens = self.tokens[:n]
        return tokens if last_embeds is None else last_embeds.to(tokens.dtype) + tokens

    def map_to_vectors(
        self, z: Float[Tensor, "*B D"], last_embeds: Float[Tensor, "*B D"] | None = None
    ) -> Float[Tensor, "*B D"]:
        """Eq. VL1: A(z) = z, or with "scale" scale r z / rms(z). The dtype is that of z.

        With summary_init "last_tokens", see `add_mapped_states` instead.
        """
        if self.residual is not None:
            assert last_embeds is not None
            return add_mapped_states(last_embeds, z, self.residual, self.r)
        if self.scale is None:
            return z
        unit = F.normalize(z.to(self.param_dtype), dim=-1)
        return (self.scale * self.r * self.width**0.5 * unit).to(z.dtype)

    def loop_input(self, t: int, z: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B 1 D"]:
        """Return the input of step t (from 1) of the autoregressive loop: A(z_{t-1}) + step_t, never gated."""
        vectors = self.map_to_vectors(z)
        return vectors if self.steps is None else vectors + self.steps[t - 1].to(vectors.dtype)

    def stop_logits(
        self, decoder: Decoder, z: Float[Tensor, "B n D"], *, head_only: bool = False
    ) -> Float[Tensor, "B n"]:
        """Compute the stop logits a_t, by the stop head or from the probability of the stop row in the vocabulary.

        The graph stops at z with the estimator "ponder"; if only the head is trained (`head_only`), at z and at the
        vocabulary.
        """
        assert self.stop_head_config is not None
        z = z.detach() if self.stop_head_config.estimator == "ponder" or head_only else z
        if self.u is not None and self.b is not None:
            return stop_logit(self.u, self.b[0], z, self.initial_bias, self.stop_head_config.head_lr_multiplier)
        logits = self.logits_with_control(decoder, z, head_only=head_only)
        return vocabulary_stop_logit(logits, decoder.config.vocab_size + STOP_ROW)

    def logits_with_control(
        self, decoder: Decoder, hidden_states: Float[Tensor, "*B D"], *, head_only: bool = False
    ) -> Float[Tensor, "*B V2"]:
        """Compute the decoder's logits, followed by those of the two control rows."""
        assert self.control is not None
        with torch.set_grad_enabled(not head_only and torch.is_grad_enabled()):
            logits = decoder.logits(hidden_states)
        control = F.linear(hidden_states, self.control.to(hidden_states.dtype))
        return torch.cat([logits, control.to(logits.dtype)], -1)

    def logits(self, decoder: Decoder, hidden_states: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Compute the logits that score text; in training they include control rows that are in the softmax."""
        head = self.stop_head_config
        if self.training and self.control is not None and head is not None and head.control_tokens_in_softmax:
            return self.logits_with_control(decoder, hidden_states)
        return decoder.logits(hidden_states)

    def length_logits(self, first_state: Float[Tensor, "B D"]) -> Float[Tensor, "B A"]:
        """Eq. VL24: logits over the allowed lengths, from a state that gets no gradient.

        Like the stop head, the classifier is stored divided by its learning rate multiplier.
        """
        assert self.ratio is not None
        assert self.stop_head_config is not None
        return self.stop_head_config.head_lr_multiplier * self.ratio(first_state.detach().to(self.param_dtype))

    def selection_scores(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        """Compute the scores r_j = v . h_j + c; tokens with the largest scores are selected."""
        assert self.v is not None
        assert self.c is not None
        return h.to(self.param_dtype) @ self.v + self.c


def add_mapped_states(
    last_embeds: Float[Tensor, "*B D"], z: Float[Tensor, "*B D"], W: Float[Tensor, "D D"], r: Float[Tensor, ""]
) -> Float[Tensor, "*B D"]:
    """Eq. VL29: the embeddings x of the last tokens + W r z / |z|, in the dtype of z; W is 0 at the beginning.

    W has D x D entries, and each moves by the learning rate in a step of AdamW: for a state of norm r rather than of
    rms r, one step moves a vector by a few hundredths of its length at a learning rate of 1e-3.
    """
    return (last_embeds.to(W.dtype) + F.linear(r * F.normalize(z.to(W.dtype), dim=-1), W)).to(z.dtype)


def last_token_embeds(
    text_embeds: Float[Tensor, "B T D"], attention_mask: Bool[Tensor, "B T"], K: int
) -> Float[Tensor, "B K D"]:
    """Return the embeddings of the last K of the c real tokens of each row, in text order.

    A text shorter than K is followed by repetitions of its last token.
    """
    c = attention_mask.sum(1, keepdim=True)
    ranks = (c - K).clamp(min=0) + torch.arange(K, device=c.device)
    order = (~attention_mask).long().argsort(dim=1, stable=True)  # columns of the real tokens first
    columns = order.gather(1, ranks.minimum(c - 1).clamp(min=0))
    return text_embeds.gather(1, columns[..., None].expand(-1, -1, text_embeds.shape[2]))


def pool_spans(
    h: Float[Tensor, "B T D"], attention_mask: Bool[Tensor, "B T"], lengths: Int[Tensor, " B"], K: int
) -> tuple[Float[Tensor, "B K D"], Bool[Tensor, "B K"]]:
    """Eq. VL25: means of h over the spans (floor((t-1)c/N), floor(tc/N)] of the c tokens, N = min(`lengths`, c).

    Also return which of them exist.
    """
    c = attention_mask.sum(1)
    N = torch.minimum(lengths, c)[:, None]
    t = torch.arange(K + 1, device=h.device)
    edges = t * c[:, None] // N.clamp(min=1)
    j = attention_mask.cumsum(1)[:, None]
    exists = t[1:] <= N
    inside = (j > edges[:, :-1, None]) & (j <= edges[:, 1:, None]) & attention_mask[:, None] & exists[..., None]
    weight = inside.to(h.dtype) / inside.sum(2, keepdim=True).clamp(min=1)
    return weight @ h.masked_fill(~attention_mask[..., None], 0.0), exists


def select_top_columns(
    r: Float[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"], lengths: Int[Tensor, " B"], K: int
) -> tuple[Int[Tensor, "B K"], Bool[Tensor, "B K"]]:
    """Eq. VL26: columns of the N tokens with the largest r, in text order; ties go to the earlier token.

    The columns are padded to K; also return which of them are selected.
    """
    T, c = r.shape[1], attention_mask.sum(1)
    order = r.detach().masked_fill(~attention_mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(T, device=r.device).expand_as(order))
    is_selected = attention_mask & (rank < lengths[:, None])
    columns = F.pad((~is_selected).long().argsort(dim=1, stable=True), (0, max(K - T, 0)))[:, :K]
    return columns, torch.arange(K, device=r.device) < torch.minimum(lengths, c)[:, None]
