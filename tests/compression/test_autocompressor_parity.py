"""A loop over transformers' OPT and Llama gives the same states, memory, loss and gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig
from laconic.models.decoder import Decoder
from tests import tolerances
from tests.compression.documents import documents, run_step
from tests.conftest import needs
from tests.models.fixtures import assert_close, fresh

BATCH = documents(((5, 4, 6), (5, 4, 6)), windows=(3, 1))
SEGMENTS = ((0, 5), (5, 9), (9, 15))


def theirs_of(ours: Decoder, folder: Path) -> Any:
    """The same weights in the model of transformers; row 1 of OPT's table, which position -1 finds, is zero."""
    from transformers import AutoModelForCausalLM

    ours.save_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    if ours.config.family == "opt":
        with torch.no_grad():
            theirs.model.decoder.embed_positions.weight[1] = 0.0
    return theirs


def course(model: Any, tokens: Tensor, zero: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, memory and the text's states of the whole batch, by `inputs_embeds` and `position_ids`."""
    inner, table = model.model, model.get_input_embeddings()
    memory = table.weight.new_zeros(2, 0, table.weight.shape[1])
    nats, n, states = torch.zeros((), dtype=torch.float64), 0, []
    for i, (start, end) in enumerate(SEGMENTS):
        ids, m, T, K = BATCH.input_ids[:, start:end], memory.shape[1], end - start, len(tokens)
        vectors = torch.cat([memory, table(ids), tokens.expand(2, -1, -1)], 1)
        position_list = [-1] * m + list(range(T)) + [-1] * K if zero else list(range(m + T + K))
        positions, mask = torch.tensor([position_list]).expand(2, -1), torch.ones(2, m + T + K, dtype=torch.long)
        inner_most = inner.decoder if zero else inner
        hidden = inner_most(
            inputs_embeds=vectors, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        states.append(hidden[:, m : m + T])
        log_p = model.lm_head(states[-1]).log_softmax(-1)
        last = SEGMENTS[i + 1][0] + 1 if i + 1 < len(SEGMENTS) else end
        targets = BATCH.input_ids[:, start + 1 : last]
        nats = nats + F.nll_loss(log_p[:, : targets.shape[1]].flatten(0, 1), targets.flatten(), reduction="sum")
        n += targets.numel()
        if i + 1 < len(SEGMENTS):
            memory = torch.cat([memory, hidden[:, m + T :]], 1)
    return nats / n, memory, states


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_autocompressor_equals_a_loop_over_transformers(name: str, tmp_path: Path) -> None:
    """Parallel summaries, fixed and accumulated: OPT's memory without positions, Llama's with plain ones."""
    needs("transformers")
    decoder = fresh(name).double()
    reading = CompressionConfig(max_vectors=3)
    method = AutoCompressor(decoder, SummaryParameters(decoder, reading, eos_token_id=2), reading, total_steps=1).eval()
    theirs, tokens = theirs_of(decoder, tmp_path / "model"), method.summaries.tokens
    assert tokens is not None
    expected = tokens.detach().clone().requires_grad_()
    loss, memory, states = course(theirs, expected, name == "opt")
    loss.backward()

    within = tolerances.ORACLE if name == "opt" else tolerances.FLOAT32  # tables of rotation are float32
    result, gradients, _ = run_step(method, BATCH)
    assert_close(result, loss, within)
    memory_mask = None
    for i, (start, end) in enumerate(SEGMENTS):
        assert_close(method.read_text(BATCH.input_ids[:, start:end], None, memory_mask), states[i], within)
        memory_mask = method.compress(BATCH.input_ids[:, start:end], None, memory_mask) if i < 2 else memory_mask
    assert memory_mask is not None
    assert_close(memory_mask.vectors, memory, within)
    pairs = [(gradients["summaries.tokens"], expected.grad)]
    theirs_named = dict(theirs.named_parameters())
    for n in (n for n in theirs_named if f"decoder.{n}" in gradients):
        g = theirs_named[n].grad
        if "embed_positions" in n:
            g = g.clone()
            g[1] = 0.0  # the row of no position
        pairs.append((gradients[f"decoder.{n}"], g))
    assert len(pairs) > 10
    scale = max(float(a.abs().max()) for a, _ in pairs)
    for a, b in pairs:
        far = (a if b is None else a - b).abs().max()
        assert float(far) <= within * scale
