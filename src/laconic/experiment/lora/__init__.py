"""LoRA: adapters in the format of peft."""
