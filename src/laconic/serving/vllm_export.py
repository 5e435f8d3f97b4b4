"""Export a run as a folder for vLLM: tokens for begin, latent and end, a chat template that adds them, eos ids."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerBackend
from torch import Tensor

from laconic.batches import ReasoningExample
from laconic.data.reasoning.dataset import answer_prefix_ids
from laconic.data.reasoning.encode import ReasoningEncoder
from laconic.data.tokenizer import Tokenizer, wrap_backend
from laconic.errors import InputError, UsageError
from laconic.experiment.export import ServerFiles, export_run
from laconic.experiment.load_run import LoadedRun
from laconic.latent.coconut import Coconut
from laconic.latent.thoughts import LatentThoughts
from laconic.models.decoder import Decoder
from laconic.serving.served_thoughts import CONFIG_KEY, ThoughtsConfig
from laconic.serving.vllm_plugin import SERVER_CONFIG_FILE, VLLM_CLASSES

CONTROL_TOKENS = ("<|laconic:begin|>", "<|laconic:latent|>", "<|laconic:end|>")
# The flags that latent thoughts need, as the file for `vllm serve --config`.
SERVER_CONFIG = "enforce-eager: true\nno-enable-chunked-prefill: true\nno-enable-prefix-caching: true\n"
REFUSAL = (  # the part of a template that refuses messages with control tokens
    f"{{%- for message in messages -%}}{{%- for token in {json.dumps(CONTROL_TOKENS)} -%}}"
    "{%- if token in message['content'] -%}{{- raise_exception('a message contains the token ' + token) -}}"
    "{%- endif -%}{%- endfor -%}{%- endfor -%}"
)
PROBES = ("1+2*3=", "Tom has 12 apples and buys 7. How many?", "x = 3\n", " a  b")  # texts with spaces and digits
ANSWERING_METHODS = ("cot", "nocot", "icot", "coconut", "codi", "pccot", "kava")
WITHOUT_PROMPT = ("cot", "icot", "coconut")  # these write the answer prompt themselves


class ControlIds(NamedTuple):
    """Ids of the tokens whose embeddings are bot, placeholder and eot."""

    begin: int
    latent: int
    end: int


def export_for_vllm(run: LoadedRun, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a run that answers questions as a folder for `vllm serve`, which `laconic.load` opens too.

    A run that thinks gets three more tokens, whose embeddings are its control vectors; the plug-in of laconic computes
    the latents. A run that writes its chain, or none, is a plain checkpoint with a chat template. The run's decoder is
    merged in place; `dtype` converts its weights, but not control vectors and projection.

    Raises:
        UsageError: If the method answers no questions, the plug-in has no class for the model's family, or an answer
            contains eos tokens.
        InputError: If the tokenizer has the tokens already, or cannot encode the parts of a prompt as one text.
        BusyError: If the folder is not empty.
        DiskError: If the disk is full.
    """
    decoder = run.merged_decoder()
    tokenizer = run.parts.tokenizer
    family = decoder.config.family
    if run.recipe.method not in ANSWERING_METHODS:
        raise UsageError(f"--to vllm: not available for method {run.recipe.method}; export it without --to")
    if run.recipe.reads_documents:
        raise UsageError("--to vllm: its questions follow summary vectors of documents; use laconic generate --memory")
    if family not in VLLM_CLASSES:
        raise UsageError(f"family {family}: the vLLM plug-in has {', '.join(VLLM_CLASSES)}; use laconic serve")
    method, data = run.recipe.method, run.recipe.data
    encoder = ReasoningEncoder(tokenizer, data)
    if method in WITHOUT_PROMPT and encoder.eos_token_id in answer_prefix_ids(tokenizer, data):
        raise UsageError(
            f'method {method} with data.format "{data.format}": an answer contains eos tokens, but vLLM stops at the '
            "first; serve the run with laconic serve"
        )
    backend = TokenizerBackend.from_str(tokenizer.backend.to_str())
    if family == "qwen2" and "ByteLevel" not in json.dumps(json.loads(backend.to_str())["pre_tokenizer"]):
        raise UsageError("family qwen2: vLLM would split texts as Qwen's own tokenizer does; use laconic serve")
    thoughts, fields, files = "", {}, {}
    vocab_size = decoder.config.vocab_size
    if run.parts.latents is not None:
        ids = add_control_tokens(backend)
        thoughts_config = build_thoughts_config(run, ids, encoder.eos_token_id)
        decoder = add_control_embeddings(decoder, run.parts.latents, ids)
        begin, latent, end = CONTROL_TOKENS
        thoughts = begin + latent * thoughts_config.num_latents + end
        fields = {
            "architectures": [f"Laconic{VLLM_CLASSES[family]}"],
            CONFIG_KEY: thoughts_config.model_dump(mode="json"),
        }
        files = {SERVER_CONFIG_FILE: SERVER_CONFIG.encode()}
    special_tokens = {**tokenizer.special_tokens, "eos_token": token_text(backend, encoder.eos_token_id)}
    served = build_tokenizer(backend, special_tokens, build_chat_template(run, encoder, thoughts))
    check_prompts(served, run, encoder, thoughts)
    decoder.config = replace(decoder.config, eos_token_ids=(encoder.eos_token_id,))
    # without a temperature, clients that name none would sample; laconic generate does not
    files["generation_config.json"] = encode_json({"eos_token_id": [encoder.eos_token_id], "temperature": 0.0})
    whole = replace(run, parts=replace(run.parts, decoder=decoder, tokenizer=served, adapter=None))
    server = ServerFiles(fields, files, vocab_size)
    export_run(whole, folder, dtype=dtype, server=server)


def build_thoughts_config(run: LoadedRun, ids: ControlIds, eos_token_id: int) -> ThoughtsConfig:
    """Return the settings of a run's latent rollout (Coconut: of its stage); suppress padding that is not eos."""
    latents, method, config = run.parts.latents, run.method, run.parts.decoder.config
    assert latents is not None
    if latents.stop_head is not None:
        raise UsageError(
            '--to vllm: latents.length_policy "stop_head" has prompts of one length only; use laconic serve'
        )
    pad = config.pad_token_id
    M = method.num_answer_latents if isinstance(method, Coconut) else latents.num_latents
    return ThoughtsConfig.model_validate(
        {
            "method": run.recipe.method,
            "step": run.step,
            "num_latents": M,
            **{
                name: latents.settings[name]
                for name in ("schedule", "num_iterations", "projection", "projection_width")
            },
            **{f"{name}_token_id": id for name, id in ids._asdict().items()},
            "suppress_token_ids": () if pad in (None, eos_token_id) or pad >= config.vocab_size else (pad,),
        }
    )


def add_control_tokens(backend: TokenizerBackend) -> ControlIds:
    """Add special tokens for bot, placeholder and eot to a tokenizer."""
    taken = next((token for token in CONTROL_TOKENS if backend.token_to_id(token) is not None), None)
    if taken is not None:
        raise InputError(f"the tokenizer has a token {taken} already; rename it in tokenizer.json")
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    ids = [backend.token_to_id(token) for token in CONTROL_TOKENS]
    return ControlIds(*(id for id in ids if id is not None))


@torch.no_grad()
def add_control_embeddings(decoder: Decoder, latents: LatentThoughts, ids: ControlIds) -> Decoder:
    """Return a decoder whose embeddings of these ids are the control vectors.

    The table grows only where the tokenizer has more tokens than the model. Ids outside the table would not do: vLLM
    counts and looks up prompt ids in tables of vocab_size entries, for penalties and log probabilities of prompts.
    """
    grown = decoder.resize_vocabulary(max(0, max(ids) + 1 - decoder.config.vocab_size))
    weight: Float[Tensor, "V D"] = grown.token_embedding.weight
    weight[list(ids)] = latents.vectors.to(weight)
    if not grown.config.tie_word_embeddings:
        head = grown.get_submodule(grown.weight_names.head).get_parameter("weight")
        head[list(ids)] = 0.0  # the plug-in never generates them
    return grown


def build_chat_template(run: LoadedRun, encoder: ReasoningEncoder, thoughts: str) -> str:
    """Return the Jinja template of question, latents and answer prompt."""
    tokenizer, data = run.parts.tokenizer, run.recipe.data
    backend, method = tokenizer.backend, run.recipe.method
    eos = token_text(backend, encoder.eos_token_id)
    prompt = answer_prefix_ids(tokenizer, data) if method not in WITHOUT_PROMPT else []
    reply = thoughts
    if prompt == [encoder.eos_token_id]:
        reply += eos
    elif prompt:
        reply += encoder.answer_prompt
    refusal = REFUSAL if thoughts else ""
    if data.format == "chat":
        if tokenizer.chat_template is None:
            raise InputError('data.format "chat": the tokenizer has no chat template; use the model\'s own tokenizer')
        source = tokenizer.chat_template.removesuffix("\n")
        return f"{refusal}{source}{{% if add_generation_prompt %}}{{{{ {quote(reply)} }}}}{{% endif %}}"
    question, num_prefix = encoder.encode_question("1")
    prefix = "".join(token_text(backend, id) for id in question.ids[:num_prefix])
    before = after = ""  # around the question
    if data.format == "icot":
        before, after = " ", f" {eos}"
    elif data.format == "coconut":
        after = "\n"
    elif data.format == "codi" and data.separator == "eos":
        after = eos
    return (
        "{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}"
        "{{- raise_exception('give one user message, the question') -}}{%- endif -%}"
        f"{refusal}{{{{- {quote(prefix + before)} + messages[0]['content'] + {quote(after + reply)} -}}}}"
    )


def token_text(backend: TokenizerBackend, id: int) -> str:
    text = backend.id_to_token(id)
    assert text is not None
    return text


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def check_prompts(served: Tokenizer, run: LoadedRun, encoder: ReasoningEncoder, thoughts: str) -> None:
    """Raise InputError if the rendered prompts of some questions have other ids than the run gives its decoder."""
    backend, tokenizer = served.backend, run.parts.tokenizer
    prompt = answer_prefix_ids(tokenizer, run.recipe.data) if run.recipe.method not in WITHOUT_PROMPT else []
    control = backend.encode(thoughts, add_special_tokens=False).ids
    for question in PROBES:
        try:
            row = encoder.encode_example(ReasoningExample("probe", question, (), "0"))
        except InputError:
            continue
        if row.num_unknown:
            continue  # a small vocabulary has no letters
        rendered = served.apply_chat_template([{"role": "user", "content": question}])
        actual = served.encode(rendered, False)
        expected = [*row.question_ids, *control, *prompt]
        if actual != expected:
            raise InputError(
                f"the tokenizer encodes question {question!r} within a prompt as {actual}, alone as {expected}; vLLM "
                "would read another question, so serve it with laconic serve"
            )


def build_tokenizer(backend: TokenizerBackend, special_tokens: Mapping[str, str], template: str) -> Tokenizer:
    """Return a tokenizer with files that transformers loads as they are, without a model's own class."""
    config = {**special_tokens, "tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": False}
    tokenizer = wrap_backend(backend, special_tokens)
    tokenizer.chat_template = template
    tokenizer.files |= {  # special_tokens_map.json replaces the base model's, which may name another eos
        "tokenizer_config.json": encode_json(config),
        "special_tokens_map.json": encode_json(special_tokens),
        "chat_template.jinja": template.encode(),
    }
    return tokenizer


def encode_json(value: Mapping[str, object] | Sequence[object]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
