"""Teach a random decoder one sentence of ids with LoRA, save the adapter, put it on another copy, merge it."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig

from laconic import Decoder, DecoderConfig, generate
from laconic.experiment.lora import add_adapter, load_adapter, merge_adapter, save_adapter
from laconic.generation.config import GenerationConfig

config = DecoderConfig.tiny("qwen3", initializer_range=0.2)
sentence = torch.tensor([[1, 40, 41, 42, 43, 44, 45, 46]])

model = add_adapter(Decoder(config, seed=0), LoraConfig(rank=8, target_modules="all-linear"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
for step in range(60):
    logits = model.logits(model(model.embed(sentence)).hidden)
    loss = F.cross_entropy(logits[0, :-1], sentence[0, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0 or step == 59:
        print(f"step {step:2}: {loss.item():.3f} nats per token")

with tempfile.TemporaryDirectory() as folder:
    save_adapter(model, Path(folder) / "adapter")  # the two files that peft loads onto a transformers model
    decoder = merge_adapter(load_adapter(Decoder(config, seed=0), Path(folder) / "adapter")).eval()

print("continued:", generate(decoder, input_ids=[[1, 40]], config=GenerationConfig(max_tokens=6))[0].token_ids)
