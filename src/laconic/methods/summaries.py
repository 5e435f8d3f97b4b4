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

from laconic.core import artifact
from laconic.core.attention import wide
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.thoughts import SPREAD, linear
from laconic.methods.halting import bias_start, stop_logit, vocabulary_logit
from laconic.methods.settings import Halting, Reading

TRIGGER, STOP = 0, 1  # of the control rows
NONE = -1.0  # the mean length of a price that has not been steered yet


class Summaries(nn.Module):
    """The parameters of one cell of the grid; those that a cell does not use are not there.

    `eos` is the id whose row the summary tokens start as. Parameters are float32 at least, whatever the decoder's
    type, and none is a scalar, of which there are no shards. Raises `Usage` (2) where there is no such id, and for a
    stop that nothing says how to learn.
    """

    r: Tensor
    steered: Tensor

    def __init__(
        self, decoder: Decoder, reading: Reading, halting: Halting | None = None, *, eos: int | None, seed: int = 0
    ) -> None:
        super().__init__()
        if halting is None and reading.length in ("stop", "ratio"):
            raise Usage(f'length "{reading.length}" without the table halting: it says how the length is learned')
        table = decoder.words.weight.detach()
        self.reading, self.halting, self.K = reading, halting, reading.fixed
        self.width, kind = table.shape[1], wide(table.dtype)
        size = 1.0 if table.is_meta else float(table.to(kind).square().mean(1).sqrt().mean())
        self.register_buffer("r", torch.tensor(size, dtype=kind))
        generator = torch.Generator().manual_seed(seed)
        self.add_places(table, eos, generator)
        self.add_map(generator)
        self.add_heads(generator)
        self.to(table.device)

    def add_places(self, table: Float[Tensor, "V D"], eos: int | None, generator: torch.Generator) -> None:
        """Summary tokens, or the trigger with its steps; control rows; the score by which tokens are selected."""
        reading, D = self.reading, self.width
        row = torch.zeros(D)
        if reading.summary_init == "eos" and reading.generator in ("parallel", "self"):
            if eos is None:
                raise Usage('summary_init "eos": the model names no such id; take "normal"')
            row = row if table.is_meta else table[eos].cpu()
        rows = self.halting is not None and self.halting.control == "rows"
        self.control = nn.Parameter(self.drawn(row, 2, generator)) if rows else None
        self.tokens = nn.Parameter(self.drawn(row, self.K, generator)) if reading.generator == "parallel" else None
        loops = reading.generator == "self"
        self.start = nn.Parameter(self.drawn(row, 1, generator)[0]) if loops and not rows else None
        self.steps = nn.Parameter(torch.zeros(self.K, D, dtype=self.kind)) if loops and reading.steps else None
        selects = reading.generator == "select"
        self.v = nn.Parameter(self.drawn(torch.zeros(D), 1, generator)[0]) if selects else None
        self.c = nn.Parameter(torch.zeros(1, dtype=self.kind)) if selects else None

    def drawn(self, row: Float[Tensor, " D"], n: int, generator: torch.Generator) -> Float[Tensor, "n D"]:
        """`n` copies of a row, each with noise of its own."""
        noise = torch.randn(n, self.width, generator=generator, device="cpu") * SPREAD
        return row.to(self.kind) + noise.to(self.kind)

    @property
    def kind(self) -> torch.dtype:
        """The type of the parameters."""
        return self.r.dtype

    def add_map(self, generator: torch.Generator) -> None:
        """The parts of A, whose r is a number of the table as it is at the start."""
        scales = self.reading.map != "none"
        self.scale = nn.Parameter(torch.ones(1, dtype=self.kind)) if scales else None
        self.inner = self.outer = None
        if self.reading.map == "mlp":
            D = self.width
            self.inner, self.outer = (linear(D, D, generator).to(self.kind) for _ in range(2))
            nn.init.zeros_(self.outer.weight)
            nn.init.zeros_(self.outer.bias)

    def add_heads(self, generator: torch.Generator) -> None:
        """The stop head, at a mean length of `start` K, or the classifier of lengths; the price and its mean length."""
        reading, how, D = self.reading, self.halting, self.width
        own = how is not None and reading.length == "stop" and how.stop_head == "own"
        self.u = nn.Parameter(torch.zeros(D, dtype=self.kind)) if own else None
        self.b = nn.Parameter(torch.zeros(1, dtype=self.kind)) if own else None
        self.begin = bias_start(how.start, reading.lengths, how.index) if own and how is not None else 0.0
        ratio = linear(D, len(reading.lengths), generator).to(self.kind) if reading.length == "ratio" else None
        if ratio is not None and how is not None:
            with torch.no_grad():
                for p in ratio.parameters():
                    p /= how.head_lr
        self.ratio = ratio
        price = 0.0 if how is None else how.price
        self.register_buffer("steered", torch.tensor([price, NONE], dtype=torch.float64))

    @property
    def anchor(self) -> Float[Tensor, ""]:
        """0 by the heads, so that a loss of which nothing else is learned still has a gradient."""
        heads = [p for p in (self.u, self.control, None if self.ratio is None else self.ratio.weight) if p is not None]
        return sum((0.0 * p.sum() for p in heads), torch.zeros((), device=self.r.device))

    @property
    def trigger(self) -> Float[Tensor, " D"]:
        """`<sum>`, a vector of its own or a control row."""
        found = self.start if self.control is None else self.control[TRIGGER]
        assert found is not None
        return found

    def vectors(self, z: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Eq. VL1: A(z) = z; scale: c r z / rms(z); mlp: that + W2 gelu(W1 z). In the type of z."""
        if self.scale is None:
            return z
        x = z.to(self.kind)
        made: Tensor = self.scale * self.r * self.width**0.5 * F.normalize(x, dim=-1)
        if self.inner is not None and self.outer is not None:
            made = made + self.outer(F.gelu(self.inner(x)))
        return made.to(z.dtype)

    def step(self, t: int, z: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B 1 D"]:
        """What step t of the loop, from 1, reads: A(z_{t-1}) + step_t, never gated."""
        made = self.vectors(z)
        return made if self.steps is None else made + self.steps[t - 1].to(made.dtype)

    def stops(self, decoder: Decoder, z: Float[Tensor, "B n D"], *, alone: bool = False) -> Float[Tensor, "B n"]:
        """a_t, by the own head or by a word's share of the vocabulary; z is cut or not as the settings say.

        `alone`: nothing but the head is to learn.
        """
        assert self.halting is not None
        z = z.detach() if self.halting.cuts or alone else z
        if self.u is not None and self.b is not None:
            return stop_logit(self.u, self.b[0], z, self.begin, self.halting.head_lr)
        return vocabulary_logit(self.with_control(decoder, z, alone=alone), decoder.config.vocab_size + STOP)

    def with_control(
        self, decoder: Decoder, hidden: Float[Tensor, "*B D"], *, alone: bool = False
    ) -> Float[Tensor, "*B V2"]:
        """The decoder's logits, and behind them those of the two control rows."""
        assert self.control is not None
        with torch.set_grad_enabled(not alone and torch.is_grad_enabled()):
            words = decoder.logits(hidden)
        return torch.cat([words, F.linear(hidden, self.control.to(hidden.dtype)).to(words.dtype)], -1)

    def logits(self, decoder: Decoder, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """What text is scored by: in training the control rows too where they are inside the softmax."""
        if self.training and self.control is not None and self.halting is not None and self.halting.control_in_softmax:
            return self.with_control(decoder, hidden)
        return decoder.logits(hidden)

    def ratios(self, first: Float[Tensor, "B D"]) -> Float[Tensor, "B A"]:
        """Eq. VL24: logits over the lengths allowed, from the state at the first place, which gets no gradient.

        As in the stop head, what is learned is held divided by `head_lr`.
        """
        assert self.ratio is not None
        assert self.halting is not None
        return self.halting.head_lr * self.ratio(first.detach().to(self.kind))

    def scores(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        """r_j = v . h_j + c, by which tokens are selected."""
        assert self.v is not None
        assert self.c is not None
        return h.to(self.kind) @ self.v + self.c

    @property
    def about(self) -> dict[str, object]:
        """What a file of these must agree in."""
        halting = None if self.halting is None else self.halting.model_dump(mode="json")
        return {"reading": self.reading.model_dump(mode="json"), "halting": halting}

    def save(self, path: str | Path, about: Mapping[str, object]) -> None:
        """One safetensors file; `about` names the base and the tokenizer it belongs to."""
        artifact.save_artifact(Path(path), self.state_dict(), "summaries", {**about, "settings": self.about})

    def load(self, path: str | Path, about: Mapping[str, object]) -> "Summaries":
        """What `save` wrote, put here. Raises `Damaged` (76) for another base, tokenizer, setting or name."""
        artifact.fill(self, Path(path), "summaries", {**about, "settings": self.about})
        return self


def pooled(
    h: Float[Tensor, "B T D"], live: Bool[Tensor, "B T"], N: Int[Tensor, " B"], K: int
) -> tuple[Float[Tensor, "B K D"], Bool[Tensor, "B K"]]:
    """Eq. VL25: means over (floor((t-1)c/N), floor(tc/N)] of the c live tokens; a text of fewer than N has c spans."""
    c = live.sum(1)
    spans = torch.minimum(N, c)[:, None]
    t = torch.arange(K + 1, device=h.device)
    edges = t * c[:, None] // spans.clamp(min=1)
    j = live.cumsum(1)[:, None]
    inside = (j > edges[:, :-1, None]) & (j <= edges[:, 1:, None]) & live[:, None] & (t[1:, None] <= spans[..., None])
    share = inside.to(h.dtype) / inside.sum(2, keepdim=True).clamp(min=1)
    return share @ h.masked_fill(~live[..., None], 0.0), t[1:] <= spans


def selected(
    r: Float[Tensor, "B T"], live: Bool[Tensor, "B T"], N: Int[Tensor, " B"], K: int
) -> tuple[Int[Tensor, "B K"], Bool[Tensor, "B K"]]:
    """Eq. VL26: the columns of the N live tokens of largest r, in text order, ties to the earlier; and which are."""
    T, c = r.shape[1], live.sum(1)
    order = r.detach().masked_fill(~live, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(T, device=r.device).expand_as(order))
    kept = live & (rank < N[:, None])
    columns = F.pad((~kept).long().argsort(dim=1, stable=True), (0, max(K - T, 0)))[:, :K]
    return columns, torch.arange(K, device=r.device) < torch.minimum(N, c)[:, None]
