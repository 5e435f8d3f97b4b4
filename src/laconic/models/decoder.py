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

from laconic.models import activations as models_activations
from laconic.models import attention, input_checks, llama2c, rope, weights
from laconic.models import positions as models_positions
from laconic.models.block import EAGER_ACTIVATIONS, Block, ForwardContext, add_submodule, build_norm, empty_embedding
from laconic.models.cache import KVCache
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.folder import warn_randomly_initialized

BlockOutput = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]
ParameterVersion = tuple[tuple[int, int], ...]
checkpointed: Callable[..., BlockOutput] = partial(checkpoint, use_reentrant=False)  # pyright: ignore[reportUnknownVariableType]


class DecoderOutput(NamedTuple):
    """What a pass gives: `hidden` [B, T, D] after the final norm, the new cache, and the stages wanted by name."""

    hidden_states: Tensor
    cache: KVCache
    activations: Mapping[str, Tensor]


class Decoder(nn.Module):
    """A decoder that reads vectors; whether a vector is a word, a thought or a memory, it does not know.

    `attention` names the back end: "sdpa", "eager" (the specification) or "flex". `recompute` = k checkpoints every
    k-th block in training, 0 none. A random start draws normal(0, initializer_range) from `seed`; with `seed=None`
    the parameters are left as the construction device makes them.
    """

    is_gradient_checkpointing = False  # what peft asks; else it leaves a hook on the words, which ours does not need

    def __init__(self, config: DecoderConfig, seed: int | None = 0) -> None:
        super().__init__()
        names = WEIGHT_NAMES[config.family]
        self.config, self.weight_names = config, names
        self.name_or_path = config.family
        self.source_folder: Path | None = None
        self.attn_implementation, self.activation_checkpointing = "sdpa", 0
        self._cached_fingerprint: tuple[str, ParameterVersion] | None = None
        add_submodule(self, names.token_embedding, empty_embedding(config.vocab_size, config.hidden_size))
        if names.position_embedding:
            add_submodule(
                self,
                names.position_embedding,
                empty_embedding(config.max_position_embeddings + config.position_offset, config.hidden_size),
            )
        add_submodule(self, names.layers, nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers)))
        add_submodule(self, names.final_norm, build_norm(config))
        if not config.tie_word_embeddings:
            add_submodule(self, names.head, nn.Linear(config.hidden_size, config.vocab_size, bias=False))
        if seed is not None:
            self.init_parameters([name for name, _ in self.named_parameters()], seed)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_name: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        allow_missing: tuple[str, ...] = (),
        ignore_tensors: tuple[str, ...] = (),
        revision: str | None = None,
    ) -> "Decoder":
        """A checkpoint of one of the six families, its weights mapped from the file where they need no change.

        `dtype` None: as stored on CUDA; float32 on a CPU, or bfloat16 if stored so and fast there. Tensors named in
        `allow_missing` may be absent and are then drawn anew, with a warning; those named in `beside` are not the
        decoder's, and left. Raises `BadInput` (66) for a folder that is no whole checkpoint, `NonFinite` (65) for NaN
        or infinity, `Unsafe` (77) for pickles, `Usage` (2).
        """
        folder = weights.find_checkpoint(folder_or_hub_name, revision)
        config = DecoderConfig.from_folder(folder)
        with torch.device("meta"):
            decoder = cls(config, seed=None)
        report = weights.load_weights(decoder, folder, config, dtype, device, allow_missing, ignore_tensors)
        warn_randomly_initialized(report.missing)
        decoder.init_parameters(list(report.missing), seed=0)
        decoder.config = replace(config, dtype=decoder.token_embedding.weight.dtype)
        decoder.source_folder, decoder.name_or_path = folder, str(folder_or_hub_name)
        decoder._cached_fingerprint = (report.fingerprint, decoder.parameter_version())
        return decoder.eval()

    @classmethod
    def from_llama2c(cls, path: str | Path) -> "Decoder":
        """The model in a file of llama2.c (`stories260K.bin`), its pairs of q and k turned to Hugging Face's.

        Raises `BadInput` (66) for a file whose header and size do not fit, `NonFinite` (65), `Unsafe` (77).
        """
        source, tensors = llama2c.read_llama2c(Path(path))
        with torch.device("meta"):
            decoder = cls(DecoderConfig.from_dict(source), seed=None)
        decoder.load_state_dict(tensors, assign=True)
        decoder.name_or_path = str(path)
        return decoder.eval()

    def save_pretrained(
        self, folder: str | Path, *, max_shard_bytes: float = 5e9, dtype: torch.dtype | None = None
    ) -> None:
        """The Hugging Face layout, which transformers loads as it is. Raises `Busy` (73) if `folder` is not empty."""
        weights.save_weights(
            self,
            Path(folder),
            self.config,
            max_shard_bytes=max_shard_bytes,
            dtype=dtype,
            source_folder=self.source_folder,
        )

    @property
    def token_embedding(self) -> Any:
        """The nn.Embedding [V, D], the head too where they are tied, or what an adapter puts in its place."""
        return self.get_input_embeddings()

    def get_input_embeddings(self) -> nn.Module:
        """The module of `words`, under the name by which peft asks for it."""
        return self.get_submodule(self.weight_names.token_embedding)

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, in order."""
        module = self.get_submodule(self.weight_names.layers)
        assert isinstance(module, nn.ModuleList)
        return module

    @property
    def fingerprint(self) -> str:
        """SHA-256 of a sample of the weights as on disk; made anew when they have changed since loading."""
        if self._cached_fingerprint is None or self._cached_fingerprint[1] != self.parameter_version():
            self._cached_fingerprint = (
                weights.weights_fingerprint(weights.checkpoint_tensors(self, self.config)),
                self.parameter_version(),
            )
        return self._cached_fingerprint[0]

    def parameter_version(self) -> ParameterVersion:
        """Of each parameter, where it lies and its count of changes in place; inference tensors have none."""
        return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.parameters())

    def attention_scale(self, layer: int) -> float:
        """What the scores of a layer are multiplied by (C11)."""
        return self.config.attention_scales[layer]

    def init_parameters(self, names: list[str], seed: int) -> None:
        """Draws the parameters named: normal(0, initializer_range), norms 1, biases 0."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name in names:
                p = self.get_parameter(name)
                if p.ndim == 2:
                    p.copy_(torch.randn(p.shape, generator=generator, device="cpu") * self.config.initializer_range)
                else:
                    p.fill_(0.0 if name.endswith("bias") else 1.0)

    def resize_vocabulary(self, num_new_tokens: int, seed: int = 0) -> "Decoder":
        """A decoder with `n` more words, the rows' mean plus noise of their spread's hundredth; the rest is shared."""
        with torch.device("meta"):
            bigger = Decoder(replace(self.config, vocab_size=self.config.vocab_size + num_new_tokens), seed=None)
        generator = torch.Generator().manual_seed(seed)
        parameters = dict(self.named_parameters())
        for name in (f"{self.weight_names.token_embedding}.weight", f"{self.weight_names.head}.weight"):
            if name in parameters:
                rows = parameters[name].detach()
                noise = torch.randn((num_new_tokens, rows.shape[1]), generator=generator, device="cpu").to(rows)
                new = rows.mean(0) + noise * rows.std(0) * 1e-2
                parameters[name] = nn.Parameter(torch.cat([rows, new]), parameters[name].requires_grad)
        for name, p in bigger.named_parameters():  # assigning asks the shared ones for what these ask
            p.requires_grad_(parameters[name].requires_grad)
        bigger.load_state_dict(parameters, assign=True)
        bigger.source_folder, bigger.name_or_path = self.source_folder, self.name_or_path
        bigger.attn_implementation, bigger.activation_checkpointing = (
            self.attn_implementation,
            self.activation_checkpointing,
        )
        return bigger.train(self.training)

    def embed(self, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """The vectors of words; places are added inside a pass. Raises `ValueError` for an id out of range."""
        if not torch.compiler.is_compiling():
            bad = (input_ids < 0) | (input_ids >= self.config.vocab_size)
            if bad.any():
                b, t = map(int, bad.nonzero()[0])
                raise ValueError(f"ids[{b}, {t}] = {int(input_ids[b, t])}, vocabulary {self.config.vocab_size}")
        return self.token_embedding(input_ids)

    def logits(self, hidden_states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """Eq. C20: h W_head^T in h's type; ask for the rows you need."""
        if self.config.tie_word_embeddings:
            return F.linear(hidden_states, self.token_embedding.weight)
        return self.get_submodule(self.weight_names.head)(hidden_states)

    def final_norm(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The last norm, after which a hidden state is what `logits` reads."""
        return self.get_submodule(self.weight_names.final_norm)(x)

    def add_positions(
        self, inputs_embeds: Float[Tensor, "B T D"], position_ids: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T D"]:
        """What layer 0 reads: the vectors, with a learned place added in GPT-2 and OPT."""
        if self.weight_names.position_embedding is None:
            return inputs_embeds
        table = self.get_submodule(self.weight_names.position_embedding).weight
        assert isinstance(table, Tensor)
        x = inputs_embeds + models_positions.position_embedding(table, position_ids, self.config.position_offset)
        return F.dropout(x, self.config.dropout.embedding, self.training)

    def build_context(
        self,
        position_ids: Int[Tensor, "B P"],
        valid: Bool[Tensor, "B P"],
        S: int,
        attention_bias: Tensor | None,
        dtype: torch.dtype,
        *,
        all_valid: bool,
        needs_scores: bool,
        shared_positions: bool = False,
    ) -> ForwardContext:
        """The table of angles of the new slots and the masks of each layer, made once a pass.

        `shared` says, without looking at the tensors, that every row has the positions of the first.
        """
        cos = sin = None
        how = self.config.rope
        if how is not None:
            turned = position_ids[:1] if shared_positions else position_ids
            longest = 1 + turned.masked_fill(~valid[: len(turned)], -1).amax(1)
            omega, a = rope.ROPE_SCALINGS[how.kind](how, self.config.head_dim, longest)
            cos, sin = rope.cos_sin_tables(turned[:, S:], omega, a, dtype)
        sdpa_only = self.attn_implementation == "sdpa" and not needs_scores
        sights = {
            window: attention.build_attention_mask(
                valid, S, all_valid=all_valid, window=window, bias=attention_bias, sdpa_only=sdpa_only, dtype=dtype
            )
            for window in dict.fromkeys(self.config.sliding_windows)
        }
        return ForwardContext(
            cos, sin, tuple(sights[window] for window in self.config.sliding_windows), self.attn_implementation
        )

    def forward(
        self,
        inputs_embeds: Float[Tensor, "B T D"],
        cache: KVCache | None = None,
        *,
        attention_mask: Bool[Tensor, "B T"] | None = None,
        position_ids: Int[Tensor, "B T"] | None = None,
        attention_bias: Float[Tensor, "#B #T #P"] | None = None,
        capture: tuple[str, ...] = (),
    ) -> DecoderOutput:
        """Reads T vectors on a cache; `state` None starts anew.

        `live` None: all live. `positions` None: C22; -1 means no position, for families with a table. `bias` is
        added to the scaled scores of every head and layer and is not kept in the state. `want` names stages.
        Raises `ValueError` for shapes, positions or states that do not fit.
        """
        input_checks.check_forward_inputs(
            self.config, self.attn_implementation, inputs_embeds, cache, attention_mask, position_ids, attention_bias
        )
        B, T = inputs_embeds.shape[:2]
        whole = attention_mask is None and cache is None
        alive = (
            torch.ones(B, T, dtype=torch.bool, device=inputs_embeds.device)
            if attention_mask is None
            else attention_mask
        )
        held = KVCache.empty(self.config, B, inputs_embeds.dtype, inputs_embeds.device) if cache is None else cache
        found, shared = position_ids is None, whole and position_ids is None
        if position_ids is None:
            position_ids = models_positions.default_position_ids(alive, held.positions, held.valid)
        all_live, all_positions = torch.cat([held.valid, alive], 1), torch.cat([held.positions, position_ids], 1)
        if not torch.compiler.is_compiling():
            input_checks.check_dtype(self.layers, inputs_embeds)
            if not found or self.config.position_encoding == "table":  # what C22 finds always fits RoPE
                input_checks.check_positions(self.config, position_ids)
            whole = whole or bool(all_live.all())
        wanted = models_activations.parse_capture(capture, self.config)
        eager = any(not layer.isdisjoint(EAGER_ACTIVATIONS) for layer in wanted.layers)
        frame = self.build_context(
            all_positions,
            all_live,
            held.S,
            attention_bias,
            inputs_embeds.dtype,
            all_valid=whole,
            needs_scores=eager,
            shared_positions=shared,
        )

        x = self.add_positions(inputs_embeds, position_ids)
        kept = {"embed": x} if "embed" in wanted.model else {}
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for i, block in enumerate(self.layers):
            if i in wanted.hidden:
                kept[f"hidden.{i}"] = x
            past = (held.keys[i], held.values[i]) if held.S else None
            again = self.activation_checkpointing and self.training and i % self.activation_checkpointing == 0
            inputs = (x, past, frame, wanted.layers[i])
            x, k, v, found = checkpointed(block, *inputs) if again else cast(BlockOutput, block(*inputs))
            keys.append(k)
            values.append(v)
            kept |= found
        hidden = self.final_norm(x)
        if len(self.layers) in wanted.hidden:
            kept[f"hidden.{len(self.layers)}"] = hidden
        kept |= self.capture_final(hidden, alive, wanted.model)
        return DecoderOutput(hidden, KVCache(tuple(keys), tuple(values), all_positions, all_live), kept)

    def capture_final(self, hidden_states: Tensor, attention_mask: Tensor, names: frozenset[str]) -> dict[str, Tensor]:
        """The stages after the last layer that are asked for."""
        made = {"final_norm": hidden_states, "attention_mask": attention_mask}
        for stage in models_activations.MODEL_ACTIVATIONS[2:]:
            if not names - {"embed"} - made.keys():
                break
            made[stage.name] = stage.function(self, *(made[name] for name in stage.inputs))
        return {name: made[name] for name in names if name in made}
