"""vLLM plug-in (entry point group `vllm.general_plugins`): registers the models that think in latents."""

from typing import Any

from laconic.errors import UsageError

SERVER_CONFIG_FILE = "vllm.yaml"  # in an exported folder, for vllm serve --config
VLLM_CLASSES = {  # family -> the class of vLLM that the plug-in derives from
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def register() -> None:
    """Register a class per family with vLLM, which imports it when a folder names it."""
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]

    for name in VLLM_CLASSES.values():
        ModelRegistry.register_model(f"Laconic{name}", f"laconic.serving.vllm_models:Laconic{name}")


def check_engine(config: Any) -> None:
    """Raise UsageError unless a `VllmConfig` lets the model see all latents of a prompt in one call.

    Chunked prefill and prefix caching cut a prompt anywhere. Pipeline stages have no final hidden states to project.
    CUDA graphs and torch.compile record one call of the model with ids. With prompt embeddings the ids are not known.
    """
    scheduler, model = config.scheduler_config, config.model_config
    needed = {
        "--no-enable-chunked-prefill": not scheduler.enable_chunked_prefill,
        "--long-prefill-token-threshold 0": not scheduler.long_prefill_token_threshold,
        "--no-enable-prefix-caching": not config.cache_config.enable_prefix_caching,
        "--pipeline-parallel-size 1": config.parallel_config.pipeline_parallel_size == 1,
        "--enforce-eager": model.enforce_eager,
        "no --enable-prompt-embeds": not model.enable_prompt_embeds,
    }
    missing = [flag for flag, is_satisfied in needed.items() if not is_satisfied]
    if missing:
        raise UsageError(f"latent thoughts need {', '.join(missing)}; {model.model}/{SERVER_CONFIG_FILE} has the flags")
