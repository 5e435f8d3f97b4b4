"""What is learned beside the decoder so that text becomes vectors: summary tokens, the trigger, maps and heads.

AutoCompressors (arXiv:2305.14788), their variable-length variant (jo100sun/AutoCompressors bb15bc1), mean pooling
(arXiv:2510.20797), Nugget (arXiv:2310.02409).

Symbols: K places, D width, V words; h_j, z_t states after the final norm at text token j and at place t; A the map
from a state to the vector written; c live tokens of a segment; N vectors kept.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laconic.compression.halting.stop_distribution import solve_initial_bias, stop_logit, vocabulary_stop_logit
from laconic.config.methods import CompressionConfig, StopHeadConfig
from laconic.errors import UsageError
from laconic.models.attention import accumulation_dtype
from laconic.models.decoder import Decoder
from laconic.models.init import NORMAL_STD, build_seeded_linear
from laconic.storage import atomic

TRIGGER_ROW, STOP_ROW = 0, 1  # of the control rows
NO_MEAN_LENGTH = -1.0  # the mean length of a price that has not been steered yet


class SummaryParameters(nn.Module):
    """The parameters of one cell of the grid; those that a cell does not use are not there.

    `eos` is the id whose row the summary tokens start as. Parameters are float32 at least, whatever the decoder's
    type, and none is a scalar, of which there are no shards. Raises `Usage` (2) where there is no such id, and for a
    stop that nothing says how to learn.
    """

    r: Tensor
    steered: Tensor

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
            raise UsageError(
                f'length "{config.length_policy}" without the table halting: it says how the length is learned'
            )
        table = decoder.token_embedding.weight.detach()
        self.config, self.stop_head_config, self.K = config, stop_head_config, config.fixed_length
        self.width, kind = table.shape[1], accumulation_dtype(table.dtype)
        size = 1.0 if table.is_meta else float(table.to(kind).square().mean(1).sqrt().mean())
        self.register_buffer("r", torch.tensor(size, dtype=kind))
        generator = torch.Generator().manual_seed(seed)
        self.add_summary_tokens(table, eos_token_id, generator)
        self.add_map(generator)
        self.add_heads(generator)
        self.to(table.device)

    def add_summary_tokens(
        self, table: Float[Tensor, "V D"], eos_token_id: int | None, generator: torch.Generator
    ) -> None:
        """Summary tokens, or the trigger with its steps; control rows; the score by which tokens are selected."""
        reading, D = self.config, self.width
        row = torch.zeros(D)
        if reading.summary_init == "eos" and reading.summary in ("parallel", "autoregressive"):
            if eos_token_id is None:
                raise UsageError('summary_init "eos": the model names no such id; take "normal"')
            row = row if table.is_meta else table[eos_token_id].cpu()
        rows = self.stop_head_config is not None and self.stop_head_config.control_tokens == "vocabulary"
        self.control = nn.Parameter(self.init_noisy_copies(row, 2, generator)) if rows else None
        self.tokens = (
            nn.Parameter(self.init_noisy_copies(row, self.K, generator)) if reading.summary == "parallel" else None
        )
        loops = reading.summary == "autoregressive"
        self.start = nn.Parameter(self.init_noisy_copies(row, 1, generator)[0]) if loops and not rows else None
        self.steps = (
            nn.Parameter(torch.zeros(self.K, D, dtype=self.param_dtype)) if loops and reading.step_embedding else None
        )
        selects = reading.summary == "select"
        self.v = nn.Parameter(self.init_noisy_copies(torch.zeros(D), 1, generator)[0]) if selects else None
        self.c = nn.Parameter(torch.zeros(1, dtype=self.param_dtype)) if selects else None

    def init_noisy_copies(self, row: Float[Tensor, " D"], n: int, generator: torch.Generator) -> Float[Tensor, "n D"]:
        """`n` copies of a row, each with noise of its own."""
        noise = torch.randn(n, self.width, generator=generator, device="cpu") * NORMAL_STD
        return row.to(self.param_dtype) + noise.to(self.param_dtype)

    @property
    def param_dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return self.r.dtype

    def add_map(self, generator: torch.Generator) -> None:
        """The parts of A, whose r is a number of the table as it is at the start."""
        scales = self.config.resolved_summary_map != "none"
        self.scale = nn.Parameter(torch.ones(1, dtype=self.param_dtype)) if scales else None
        self.inner = self.outer = None
        if self.config.resolved_summary_map == "mlp":
            D = self.width
            self.inner, self.outer = (build_seeded_linear(D, D, generator).to(self.param_dtype) for _ in range(2))
            nn.init.zeros_(self.outer.weight)
            nn.init.zeros_(self.outer.bias)

    def add_heads(self, generator: torch.Generator) -> None:
        """The stop head, at a mean length of `start` K, or the classifier of lengths; the price and its mean length."""
        reading, how, D = self.config, self.stop_head_config, self.width
        own = how is not None and reading.length_policy == "stop_head" and how.head == "linear"
        self.u = nn.Parameter(torch.zeros(D, dtype=self.param_dtype)) if own else None
        self.b = nn.Parameter(torch.zeros(1, dtype=self.param_dtype)) if own else None
        self.initial_bias = (
            solve_initial_bias(how.initial_mean_fraction, reading.possible_lengths, how.stop_position)
            if own and how is not None
            else 0.0
        )
        ratio = (
            build_seeded_linear(D, len(reading.possible_lengths), generator).to(self.param_dtype)
            if reading.length_policy == "classifier"
            else None
        )
        if ratio is not None and how is not None:
            with torch.no_grad():
                for p in ratio.parameters():
                    p /= how.head_lr_multiplier
        self.ratio = ratio
        price = 0.0 if how is None else how.length_cost
        self.register_buffer("steered", torch.tensor([price, NO_MEAN_LENGTH], dtype=torch.float64))

    @property
    def zero_loss(self) -> Float[Tensor, ""]:
        """0 by the heads, so that a loss of which nothing else is learned still has a gradient."""
        heads = [p for p in (self.u, self.control, None if self.ratio is None else self.ratio.weight) if p is not None]
        return sum((0.0 * p.sum() for p in heads), torch.zeros((), device=self.r.device))

    @property
    def trigger_vector(self) -> Float[Tensor, " D"]:
        """`<sum>`, a vector of its own or a control row."""
        found = self.start if self.control is None else self.control[TRIGGER_ROW]
        assert found is not None
        return found

    def map_to_vectors(self, z: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Eq. VL1: A(z) = z; scale: c r z / rms(z); mlp: that + W2 gelu(W1 z). In the type of z."""
        if self.scale is None:
            return z
        x = z.to(self.param_dtype)
        made: Tensor = self.scale * self.r * self.width**0.5 * F.normalize(x, dim=-1)
        if self.inner is not None and self.outer is not None:
            made = made + self.outer(F.gelu(self.inner(x)))
        return made.to(z.dtype)

    def loop_input(self, t: int, z: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B 1 D"]:
        """What step t of the loop, from 1, reads: A(z_{t-1}) + step_t, never gated."""
        made = self.map_to_vectors(z)
        return made if self.steps is None else made + self.steps[t - 1].to(made.dtype)

    def stop_logits(
        self, decoder: Decoder, z: Float[Tensor, "B n D"], *, head_only: bool = False
    ) -> Float[Tensor, "B n"]:
        """a_t, by the own head or by a word's share of the vocabulary; z is cut or not as the settings say.

        `alone`: nothing but the head is to learn.
        """
        assert self.stop_head_config is not None
        z = z.detach() if self.stop_head_config.detaches_head_input or head_only else z
        if self.u is not None and self.b is not None:
            return stop_logit(self.u, self.b[0], z, self.initial_bias, self.stop_head_config.head_lr_multiplier)
        return vocabulary_stop_logit(
            self.logits_with_control(decoder, z, head_only=head_only), decoder.config.vocab_size + STOP_ROW
        )

    def logits_with_control(
        self, decoder: Decoder, hidden_states: Float[Tensor, "*B D"], *, head_only: bool = False
    ) -> Float[Tensor, "*B V2"]:
        """The decoder's logits, and behind them those of the two control rows."""
        assert self.control is not None
        with torch.set_grad_enabled(not head_only and torch.is_grad_enabled()):
            words = decoder.logits(hidden_states)
        return torch.cat([words, F.linear(hidden_states, self.control.to(hidden_states.dtype)).to(words.dtype)], -1)

    def logits(self, decoder: Decoder, hidden_states: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """What text is scored by: in training the control rows too where they are inside the softmax."""
        if (
            self.training
            and self.control is not None
            and self.stop_head_config is not None
            and self.stop_head_config.control_tokens_in_softmax
        ):
            return self.logits_with_control(decoder, hidden_states)
        return decoder.logits(hidden_states)

    def length_logits(self, first_state: Float[Tensor, "B D"]) -> Float[Tensor, "B A"]:
        """Eq. VL24: logits over the lengths allowed, from the state at the first place, which gets no gradient.

        As in the stop head, what is learned is held divided by `head_lr`.
        """
        assert self.ratio is not None
        assert self.stop_head_config is not None
        return self.stop_head_config.head_lr_multiplier * self.ratio(first_state.detach().to(self.param_dtype))

    def selection_scores(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        """r_j = v . h_j + c, by which tokens are selected."""
        assert self.v is not None
        assert self.c is not None
        return h.to(self.param_dtype) @ self.v + self.c

    @property
    def settings(self) -> dict[str, object]:
        """What a file of these must agree in."""
        halting = None if self.stop_head_config is None else self.stop_head_config.model_dump(mode="json")
        return {"compression": self.config.model_dump(mode="json"), "stop_head": halting}

    def save(self, path: str | Path, metadata: Mapping[str, object]) -> None:
        """One safetensors file; `about` names the base and the tokenizer it belongs to."""
        atomic.save_artifact(Path(path), self.state_dict(), "summaries", {**metadata, "settings": self.settings})

    def load(self, path: str | Path, metadata: Mapping[str, object]) -> "SummaryParameters":
        """What `save` wrote, put here. Raises `Damaged` (76) for another base, tokenizer, setting or name."""
        atomic.load_into_module(self, Path(path), "summaries", {**metadata, "settings": self.settings})
        return self


def pool_spans(
    h: Float[Tensor, "B T D"], attention_mask: Bool[Tensor, "B T"], lengths: Int[Tensor, " B"], K: int
) -> tuple[Float[Tensor, "B K D"], Bool[Tensor, "B K"]]:
    """Eq. VL25: means over (floor((t-1)c/N), floor(tc/N)] of the c live tokens; a text of fewer than N has c spans."""
    c = attention_mask.sum(1)
    spans = torch.minimum(lengths, c)[:, None]
    t = torch.arange(K + 1, device=h.device)
    edges = t * c[:, None] // spans.clamp(min=1)
    j = attention_mask.cumsum(1)[:, None]
    inside = (
        (j > edges[:, :-1, None])
        & (j <= edges[:, 1:, None])
        & attention_mask[:, None]
        & (t[1:, None] <= spans[..., None])
    )
    share = inside.to(h.dtype) / inside.sum(2, keepdim=True).clamp(min=1)
    return share @ h.masked_fill(~attention_mask[..., None], 0.0), t[1:] <= spans


def select_top_columns(
    r: Float[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"], lengths: Int[Tensor, " B"], K: int
) -> tuple[Int[Tensor, "B K"], Bool[Tensor, "B K"]]:
    """Eq. VL26: the columns of the N live tokens of largest r, in text order, ties to the earlier; and which are."""
    T, c = r.shape[1], attention_mask.sum(1)
    order = r.detach().masked_fill(~attention_mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(T, device=r.device).expand_as(order))
    kept = attention_mask & (rank < lengths[:, None])
    columns = F.pad((~kept).long().argsort(dim=1, stable=True), (0, max(K - T, 0)))[:, :K]
    return columns, torch.arange(K, device=r.device) < torch.minimum(lengths, c)[:, None]
