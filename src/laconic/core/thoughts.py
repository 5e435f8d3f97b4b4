"""What is learned beside the decoder so that it can think: the vectors bot, slot and eot, and the map fed back.

CODI arXiv:2502.21074, PCCoT arXiv:2506.18582, Coconut arXiv:2412.06769.

Shapes: B rows, M thoughts, D width, P inner width of CODI's map, V vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.core import artifact
from laconic.core.attention import wide
from laconic.core.cache import Cache
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.rollout import Edit, Mode, Reader, Rollout, rollout

Form = Literal["pccot", "codi", "none"]
EPS = 1e-5  # of the map's LayerNorm
SPREAD = 0.02  # of vectors drawn at the start


class Thoughts(nn.Module):
    """bot, slot and eot, and the projection from a hidden state to the next vector; how many thoughts, how made.

    `control` "vectors" keeps the three out of the vocabulary; "rows" scores them too where head and words are tied,
    as words appended to the vocabulary would be, so that `logits` has three more columns, which nothing ever targets.
    They start as the mean of the embedding table, as normal noise of `seed`, or as the mean of the rows of some ids.
    Parameters are float32 at least, whatever the decoder's type.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        count: int,
        mode: Mode = "jacobi",
        rounds: int | None = None,
        project: Form = "pccot",
        project_width: int | None = None,
        project_dropout: float = 0.0,
        project_scale: Literal["unit", "embedding"] = "unit",
        control: Literal["vectors", "rows"] = "vectors",
        control_init: Literal["mean", "normal"] | tuple[int, ...] = "mean",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if (rounds is None) != (mode == "sequential"):
            raise Usage(f"rounds {rounds}: mode jacobi needs a number, sequential has none")
        self.mode: Mode = mode
        self.count, self.rounds, self.control = count, rounds, control
        table = decoder.words.weight.detach()
        D, dtype, device = table.shape[1], wide(table.dtype), table.device
        generator = torch.Generator().manual_seed(seed)
        self.vectors = nn.Parameter(started(table, control_init, generator).to(dtype))
        width, dropout = (project_width or D, project_dropout) if project == "codi" else (D, 0.0)
        self.map = None if project == "none" else Projection(D, width, dropout, generator).to(device, dtype)
        if self.map is not None and project_scale == "embedding":
            nn.init.constant_(self.map.norm.weight, float(table.to(dtype).square().mean().sqrt()))
        self.about = {
            "count": count, "mode": mode, "rounds": rounds, "project": project,
            "project_width": width, "project_dropout": dropout, "control": control,
        }  # fmt: skip

    @property
    def bot(self) -> Float[Tensor, " D"]:
        """What begins the thoughts."""
        return self.vectors[0]

    @property
    def slot(self) -> Float[Tensor, " D"]:
        """The placeholder that a thought takes the place of."""
        return self.vectors[1]

    @property
    def eot(self) -> Float[Tensor, " D"]:
        """What ends the thoughts."""
        return self.vectors[2]

    def project(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """The vector that a hidden state becomes when it is read, in the hidden state's type."""
        return hidden if self.map is None else self.map(hidden.to(self.vectors.dtype)).to(hidden.dtype)

    def logits(self, decoder: Decoder, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """The decoder's, and those of the three rows behind them where they are words of a tied head."""
        words = decoder.logits(hidden)
        if self.control == "vectors" or not decoder.config.tie_word_embeddings:
            return words
        return torch.cat([words, F.linear(hidden, self.vectors.to(hidden.dtype)).to(words.dtype)], -1)

    def think(
        self,
        decoder: Decoder,
        state: Cache | None = None,
        *,
        question: Float[Tensor, "B Nq D"] | None = None,
        live: Bool[Tensor, "B Nq"] | None = None,
        reader: Reader | None = None,
        edit: Edit | None = None,
        trace: bool = False,
    ) -> Rollout:
        """The thoughts that follow `state`, or follow the vectors of a question that is read in the same pass as bot.

        `live` is the question's; `reader` reads in the decoder's place. Raises `Usage` (2) where there is neither.
        """
        if state is None and question is None:
            raise Usage("thoughts follow nothing; give the state of a question, or its vectors")
        B = state.B if state is not None else len(question) if question is not None else 0
        prefix = self.bot.to(decoder.words.weight.dtype).expand(B, 1, -1)
        if question is not None:
            live = None if live is None else torch.cat([live, live.new_ones(B, 1)], 1)
            prefix = torch.cat([question, prefix.to(question.dtype)], 1)
        return rollout(
            reader or decoder,
            prefix,
            self.slot,
            self.count,
            self.rounds,
            project=self.project,
            state=state,
            live=live,
            mode=self.mode,
            edit=edit,
            trace=trace,
        )

    def save(self, path: str | Path, about: Mapping[str, object]) -> None:
        """One safetensors file; `about` names the base and the tokenizer it belongs to."""
        artifact.save_artifact(Path(path), self.state_dict(), "thoughts", {**about, "settings": self.about})

    def load(self, path: str | Path, about: Mapping[str, object]) -> "Thoughts":
        """What `save` wrote, put here. Raises `Damaged` (76) for another base, tokenizer, setting or name."""
        artifact.fill(self, Path(path), "thoughts", {**about, "settings": self.about})
        return self


def started(
    table: Float[Tensor, "V D"], how: Literal["mean", "normal"] | tuple[int, ...], generator: torch.Generator
) -> Float[Tensor, "3 D"]:
    """bot, slot and eot before training, in the table's place and wide type."""
    D, dtype = table.shape[1], wide(table.dtype)
    if how == "normal":
        return (torch.randn(3, D, generator=generator) * SPREAD).to(table.device, dtype)
    rows = table if how == "mean" else table[list(how)]
    if not len(rows):
        raise Usage("control_init copies the rows of no token; name a text that the tokenizer has tokens for")
    return rows.mean(0, dtype=dtype).expand(3, -1).clone()


class Projection(nn.Module):
    """LayerNorm of two linear maps with GELU (erf) between: PCCoT's with P = D, CODI's with dropout before it."""

    def __init__(self, D: int, P: int, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner, self.outer = linear(D, P, generator), linear(P, D, generator)
        self.norm = nn.LayerNorm(D, EPS)

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        return self.norm(self.outer(F.gelu(self.inner(F.dropout(x, self.dropout, self.training)))))


def linear(inner: int, outer: int, generator: torch.Generator) -> nn.Linear:
    """A map as torch starts it, uniform in ±1/√inner, drawn by a generator of its own."""
    made, bound = nn.Linear(inner, outer, device="meta").to_empty(device="cpu"), inner**-0.5
    with torch.no_grad():
        for p in made.parameters():
            p.copy_((torch.rand(p.shape, generator=generator) * 2 - 1) * bound)
    return made
