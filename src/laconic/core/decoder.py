"""The Llama family, whole: vectors in, vectors and a cache out, by the weights of a Hugging Face checkpoint.

Llama (arXiv:2302.13971, 2407.21783), Mistral (2310.06825), Qwen (2407.10671, 2505.09388), GPT-2, OPT (2205.01068).

Shapes: B rows, T new slots, S slots held, P = S + T, D width, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from laconic.core import attention, fit, formats, places, rope, stages, weights
from laconic.core.block import ATTENTION_STAGES, Block, Frame, norm, plant, rows
from laconic.core.cache import Cache
from laconic.core.families import NAMES, DecoderConfig
from laconic.core.folder import say_drawn

Read = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]
Version = tuple[tuple[int, int], ...]
recomputed: Callable[..., Read] = partial(checkpoint, use_reentrant=False)  # pyright: ignore[reportUnknownVariableType]


class Seen(NamedTuple):
    """What a pass gives: `hidden` [B, T, D] after the final norm, the new cache, and the stages wanted by name."""

    hidden: Tensor
    state: Cache
    stages: Mapping[str, Tensor]


class Decoder(nn.Module):
    """A decoder that reads vectors; whether a vector is a word, a thought or a memory, it does not know.

    `attention` names the back end: "sdpa", "eager" (the specification) or "flex". `recompute` = k checkpoints every
    k-th block in training, 0 none. A random start draws normal(0, initializer_range) from `seed`; with `seed=None`
    the parameters are left as the construction device makes them.
    """

    is_gradient_checkpointing = False  # what peft asks; else it leaves a hook on the words, which ours does not need

    def __init__(self, config: DecoderConfig, seed: int | None = 0) -> None:
        super().__init__()
        names = NAMES[config.family]
        self.config, self.names = config, names
        self.name_or_path = config.family
        self.folder: Path | None = None
        self.attention, self.recompute = "sdpa", 0
        self._stored: tuple[str, Version] | None = None
        plant(self, names.words, rows(config.vocab_size, config.hidden_size))
        if names.places:
            plant(self, names.places, rows(config.max_position_embeddings + config.offset, config.hidden_size))
        plant(self, names.blocks, nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers)))
        plant(self, names.final_norm, norm(config))
        if not config.tie_word_embeddings:
            plant(self, names.head, nn.Linear(config.hidden_size, config.vocab_size, bias=False))
        if seed is not None:
            self.initialise([name for name, _ in self.named_parameters()], seed)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_name: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        allow_missing: tuple[str, ...] = (),
        beside: tuple[str, ...] = (),
        revision: str | None = None,
    ) -> "Decoder":
        """A checkpoint of one of the six families, its weights mapped from the file where they need no change.

        `dtype` None: as stored on CUDA; float32 on a CPU, or bfloat16 if stored so and fast there. Tensors named in
        `allow_missing` may be absent and are then drawn anew, with a warning; those named in `beside` are not the
        decoder's, and left. Raises `BadInput` (66) for a folder that is no whole checkpoint, `NonFinite` (65) for NaN
        or infinity, `Unsafe` (77) for pickles, `Usage` (2).
        """
        folder = weights.find(folder_or_hub_name, revision)
        config = DecoderConfig.read(folder)
        with torch.device("meta"):
            decoder = cls(config, seed=None)
        report = weights.load_weights(decoder, folder, config, dtype, device, allow_missing, beside)
        say_drawn(report.missing)
        decoder.initialise(list(report.missing), seed=0)
        decoder.config = replace(config, dtype=decoder.words.weight.dtype)
        decoder.folder, decoder.name_or_path = folder, str(folder_or_hub_name)
        decoder._stored = (report.fingerprint, decoder.version())
        return decoder.eval()

    @classmethod
    def from_llama2c(cls, path: str | Path) -> "Decoder":
        """The model in a file of llama2.c (`stories260K.bin`), its pairs of q and k turned to Hugging Face's.

        Raises `BadInput` (66) for a file whose header and size do not fit, `NonFinite` (65), `Unsafe` (77).
        """
        source, tensors = formats.read_llama2c(Path(path))
        with torch.device("meta"):
            decoder = cls(DecoderConfig.parse(source), seed=None)
        decoder.load_state_dict(tensors, assign=True)
        decoder.name_or_path = str(path)
        return decoder.eval()

    def save_pretrained(
        self, folder: str | Path, *, shard_bytes: float = 5e9, dtype: torch.dtype | None = None
    ) -> None:
        """The Hugging Face layout, which transformers loads as it is. Raises `Busy` (73) if `folder` is not empty."""
        weights.save_weights(
            self, Path(folder), self.config, shard_bytes=shard_bytes, dtype=dtype, source_folder=self.folder
        )

    @property
    def words(self) -> Any:
        """The nn.Embedding [V, D], the head too where they are tied, or what an adapter puts in its place."""
        return self.get_input_embeddings()

    def get_input_embeddings(self) -> nn.Module:
        """The module of `words`, under the name by which peft asks for it."""
        return self.get_submodule(self.names.words)

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, in order."""
        module = self.get_submodule(self.names.blocks)
        assert isinstance(module, nn.ModuleList)
        return module

    @property
    def fingerprint(self) -> str:
        """SHA-256 of a sample of the weights as on disk; made anew when they have changed since loading."""
        if self._stored is None or self._stored[1] != self.version():
            self._stored = (weights.fingerprint(weights.on_disk(self, self.config)), self.version())
        return self._stored[0]

    def version(self) -> Version:
        """Of each parameter, where it lies and its count of changes in place; inference tensors have none."""
        return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.parameters())

    def scale(self, layer: int) -> float:
        """What the scores of a layer are multiplied by (C11)."""
        return self.config.score_scale[layer]

    def initialise(self, names: list[str], seed: int) -> None:
        """Draws the parameters named: normal(0, initializer_range), norms 1, biases 0."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name in names:
                p = self.get_parameter(name)
                if p.ndim == 2:
                    p.copy_(torch.randn(p.shape, generator=generator, device="cpu") * self.config.initializer_range)
                else:
                    p.fill_(0.0 if name.endswith("bias") else 1.0)

    def grow(self, n: int, seed: int = 0) -> "Decoder":
        """A decoder with `n` more words, the rows' mean plus noise of their spread's hundredth; the rest is shared."""
        with torch.device("meta"):
            bigger = Decoder(replace(self.config, vocab_size=self.config.vocab_size + n), seed=None)
        generator = torch.Generator().manual_seed(seed)
        parameters = dict(self.named_parameters())
        for name in (f"{self.names.words}.weight", f"{self.names.head}.weight"):
            if name in parameters:
                rows = parameters[name].detach()
                noise = torch.randn((n, rows.shape[1]), generator=generator, device="cpu").to(rows)
                new = rows.mean(0) + noise * rows.std(0) * 1e-2
                parameters[name] = nn.Parameter(torch.cat([rows, new]), parameters[name].requires_grad)
        for name, p in bigger.named_parameters():  # assigning asks the shared ones for what these ask
            p.requires_grad_(parameters[name].requires_grad)
        bigger.load_state_dict(parameters, assign=True)
        bigger.folder, bigger.name_or_path = self.folder, self.name_or_path
        bigger.attention, bigger.recompute = self.attention, self.recompute
        return bigger.train(self.training)

    def embed(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """The vectors of words; places are added inside a pass. Raises `ValueError` for an id out of range."""
        if not torch.compiler.is_compiling():
            bad = (ids < 0) | (ids >= self.config.vocab_size)
            if bad.any():
                b, t = map(int, bad.nonzero()[0])
                raise ValueError(f"ids[{b}, {t}] = {int(ids[b, t])}, vocabulary {self.config.vocab_size}")
        return self.words(ids)

    def logits(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """Eq. C20: h W_head^T in h's type; ask for the rows you need."""
        if self.config.tie_word_embeddings:
            return F.linear(hidden, self.words.weight)
        return self.get_submodule(self.names.head)(hidden)

    def final_norm(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The last norm, after which a hidden state is what `logits` reads."""
        return self.get_submodule(self.names.final_norm)(x)

    def placed(self, vectors: Float[Tensor, "B T D"], positions: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """What layer 0 reads: the vectors, with a learned place added in GPT-2 and OPT."""
        if self.names.places is None:
            return vectors
        table = self.get_submodule(self.names.places).weight
        assert isinstance(table, Tensor)
        x = vectors + places.places(table, positions, self.config.offset)
        return F.dropout(x, self.config.dropout.embedding, self.training)

    def frame(
        self,
        positions: Int[Tensor, "B P"],
        live: Bool[Tensor, "B P"],
        S: int,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        whole: bool,
        eager: bool,
        shared: bool = False,
    ) -> Frame:
        """The table of angles of the new slots and the masks of each layer, made once a pass.

        `shared` says, without looking at the tensors, that every row has the positions of the first.
        """
        cos = sin = None
        how = self.config.rope
        if how is not None:
            turned = positions[:1] if shared else positions
            longest = 1 + turned.masked_fill(~live[: len(turned)], -1).amax(1)
            omega, a = rope.SCALINGS[how.kind](how, self.config.head_dim, longest)
            cos, sin = rope.tables(turned[:, S:], omega, a, dtype)
        sdpa_only = self.attention == "sdpa" and not eager
        sights = {
            window: attention.sight(live, S, whole=whole, window=window, bias=bias, sdpa_only=sdpa_only, dtype=dtype)
            for window in dict.fromkeys(self.config.windows)
        }
        return Frame(cos, sin, tuple(sights[window] for window in self.config.windows), self.attention)

    def forward(
        self,
        vectors: Float[Tensor, "B T D"],
        state: Cache | None = None,
        *,
        live: Bool[Tensor, "B T"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
        bias: Float[Tensor, "#B #T #P"] | None = None,
        want: tuple[str, ...] = (),
    ) -> Seen:
        """Reads T vectors on a cache; `state` None starts anew.

        `live` None: all live. `positions` None: C22; -1 means no position, for families with a table. `bias` is
        added to the scaled scores of every head and layer and is not kept in the state. `want` names stages.
        Raises `ValueError` for shapes, positions or states that do not fit.
        """
        fit.check_call(self.config, self.attention, vectors, state, live, positions, bias)
        B, T = vectors.shape[:2]
        whole = live is None and state is None
        alive = torch.ones(B, T, dtype=torch.bool, device=vectors.device) if live is None else live
        held = Cache.empty(self.config, B, vectors.dtype, vectors.device) if state is None else state
        found, shared = positions is None, whole and positions is None
        if positions is None:
            positions = places.default_positions(alive, held.positions, held.live)
        all_live, all_positions = torch.cat([held.live, alive], 1), torch.cat([held.positions, positions], 1)
        if not torch.compiler.is_compiling():
            fit.check_type(self.blocks, vectors)
            if not found or self.config.place == "table":  # what C22 finds always fits RoPE
                fit.check_positions(self.config, positions)
            whole = whole or bool(all_live.all())
        wanted = stages.wanted(want, self.config)
        eager = any(not layer.isdisjoint(ATTENTION_STAGES) for layer in wanted.layers)
        frame = self.frame(
            all_positions, all_live, held.S, bias, vectors.dtype, whole=whole, eager=eager, shared=shared
        )

        x = self.placed(vectors, positions)
        kept = {"embed": x} if "embed" in wanted.model else {}
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            if i in wanted.hidden:
                kept[f"hidden.{i}"] = x
            past = (held.keys[i], held.values[i]) if held.S else None
            again = self.recompute and self.training and i % self.recompute == 0
            inputs = (x, past, frame, wanted.layers[i])
            x, k, v, found = recomputed(block, *inputs) if again else cast(Read, block(*inputs))
            keys.append(k)
            values.append(v)
            kept |= found
        hidden = self.final_norm(x)
        if len(self.blocks) in wanted.hidden:
            kept[f"hidden.{len(self.blocks)}"] = hidden
        kept |= self.endings(hidden, alive, wanted.model)
        return Seen(hidden, Cache(tuple(keys), tuple(values), all_positions, all_live), kept)

    def endings(self, hidden: Tensor, live: Tensor, names: frozenset[str]) -> dict[str, Tensor]:
        """The stages after the last layer that are asked for."""
        made = {"final_norm": hidden, "live": live}
        for stage in stages.MODEL[2:]:
            if not names - {"embed"} - made.keys():
                break
            made[stage.name] = stage.function(self, *(made[name] for name in stage.inputs))
        return {name: made[name] for name in names if name in made}
