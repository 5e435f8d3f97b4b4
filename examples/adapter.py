"""Train a LoRA adapter on one sequence, save it, load it onto a copy of the model and merge it."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig

from laconic import Decoder, DecoderConfig, GenerationConfig, generate
from laconic.experiment.lora.lora import add_adapter, load_adapter, merge_adapter, save_adapter

config = DecoderConfig.tiny("qwen3", initializer_range=0.2)
input_ids = torch.tensor([[1, 40, 41, 42, 43, 44, 45, 46]])

model = add_adapter(Decoder(config, seed=0), LoraConfig(r=8, target_modules="all-linear"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
for step in range(60):
    logits = model.logits(model(model.embed(input_ids)).hidden_states)
    loss = F.cross_entropy(logits[0, :-1], input_ids[0, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0 or step == 59:
        print(f"step {step:2}: loss {loss.item():.3f}")

with tempfile.TemporaryDirectory() as folder:
    adapter = Path(folder) / "adapter"
    save_adapter(model, adapter)  # in peft's format, which also loads onto a transformers model
    decoder = merge_adapter(load_adapter(Decoder(config, seed=0), adapter)).eval()

print("generated:", generate(decoder, input_ids=[[1, 40]], config=GenerationConfig(max_tokens=6))[0].token_ids)
