"""Prompts of requests as the engine reads them: ids or questions, what they continue, and how they end."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from laconic.batches import ReasoningBatch
from laconic.data.messages import Message
from laconic.data.reasoning.dataset import answer_prefix_ids
from laconic.errors import InputError, UsageError
from laconic.experiment.from_recipe.methods import Question, build_questions_batch
from laconic.experiment.text_models.chat_session import ChatPrefix, ChatSession
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.experiment.text_models.text_model import find_eos_ids
from laconic.generation.config import GenerationConfig
from laconic.nested.state import FastWeightState
from laconic.serving.http.api_error import ApiError
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.schemas import ChatMessage, ChatRequest, GenerationRequest
from laconic.serving.requests import EngineRequest

ANSWER_TOKENS = 128  # default max_tokens of runs that answer questions
MIN_ANSWER_TOKENS = 128  # an attention cache that leaves less room for an answer is emptied
MAX_SEED = 2**63
Prefix = ChatPrefix | FastWeightState | None  # what a prompt continues: memories, or a session that has learned


def prepare_text(served: ApiModel, prompt: str | Sequence[int], prefix: Prefix) -> EngineRequest:
    """Encode a prompt to continue. Raises ApiError (400) if it is empty, too long, or has ids out of range."""
    model, tokenizer = served.model, served.tokenizer
    if isinstance(prompt, str):
        check_characters(served, len(prompt), "prompt")
    if isinstance(model, Reasoner):
        if not isinstance(prompt, str):
            raise ApiError(400, f"prompt: {served.name} answers questions; give texts, not token ids", "prompt")
        return prepare_question(served, model, prompt, "prompt")
    eos = model.stop_token_ids if isinstance(model, TextCompressor | NestedTextModel) else ()
    if not isinstance(prompt, str):
        ids = list(prompt)
    elif isinstance(prefix, ChatPrefix) and prefix.opening:  # a memory of a chat is continued as a chat
        session = ChatSession(served.decoder, tokenizer, prefix=prefix)
        ids = session.encode([{"role": "user", "content": prompt}])
        eos = session.eos_token_ids
    else:
        ids = tokenizer.encode(prompt, add_special_tokens=prefix is None)
    return check_prompt(served, ids, prefix, eos or find_eos_ids(served.decoder.config), "prompt")


def prepare_chat(served: ApiModel, body: ChatRequest, prefix: Prefix) -> EngineRequest:
    """Encode messages with the chat template; a run that answers questions encodes them in its recipe's format."""
    messages = read_messages(served, body.messages)
    is_chat_memory = isinstance(prefix, ChatPrefix) and prefix.opening
    if is_chat_memory or isinstance(served.model, Reasoner):
        check_template_variables(served, messages, body.chat_template_kwargs)
    if isinstance(served.model, Reasoner):
        question = choose_question(served.name, served.model, messages)
        return prepare_question(served, served.model, question, "messages")
    try:
        session = ChatSession(
            served.decoder, served.tokenizer, prefix=prefix if isinstance(prefix, ChatPrefix) else None
        )
        ids = session.encode(messages, body.chat_template_kwargs)
    except (InputError, UsageError) as error:
        raise ApiError(400, f"messages: {error}", "messages") from None
    return check_prompt(served, ids, prefix, session.eos_token_ids, "messages")


def check_template_variables(
    served: ApiModel, messages: Sequence[Message], variables: Mapping[str, Any] | None
) -> None:
    """Raise ApiError (400) for variables that change how a run, or a memory of a chat, reads messages."""
    model, render = served.model, served.tokenizer.apply_chat_template
    reads_template = not isinstance(model, Reasoner) or model.recipe.data.format == "chat"
    if variables and reads_template and render(messages, variables=variables) != render(messages):
        message = "chat_template_kwargs: the template of a run or memory is fixed, and they change it; remove them"
        raise ApiError(400, message, "chat_template_kwargs")


def read_messages(served: ApiModel, chat: Sequence[ChatMessage]) -> list[Message]:
    """Return messages whose role developer, OpenAI's newer name of system, is one that the template knows."""
    template = served.tokenizer.chat_template
    if template is None and not isinstance(served.model, Reasoner):
        raise ApiError(400, f"{served.name} has no chat template; send a prompt, as to /v1/completions", "messages")
    check_characters(served, sum(len(message.content) for message in chat), "messages")
    new_roles = {} if "developer" in (template or "") else {"developer": "system"}
    return [{**m.model_dump(exclude_none=True), "role": new_roles.get(m.role, m.role)} for m in chat]


def choose_question(name: str, model: Reasoner, messages: Sequence[Message]) -> Question:
    """Return the question as the run was trained on it: a whole conversation, or the text of its only message."""
    role = messages[-1]["role"]
    row_format = model.recipe.data.format
    if role != "user":
        message = f"messages: the last one has role {role}; end with the question, with role user"
        raise ApiError(400, message, "messages")
    if row_format == "chat":
        return messages
    if len(messages) > 1:
        message = f'{name} was trained on single questions (data.format = "{row_format}"); give one message'
        raise ApiError(400, f"messages: {message}", "messages")
    return messages[0]["content"]


def prepare_question(served: ApiModel, model: Reasoner, question: Question, param: str) -> EngineRequest:
    """Encode a question. Raises ApiError (400) if it is too long or cannot be encoded."""
    try:
        batch = encode_question(model, question)
    except InputError as error:
        raise ApiError(400, f"{param}: {error}", param) from None
    num_reserved = model.recipe.num_latent_positions + len(answer_prefix_ids(served.tokenizer, model.recipe.data))
    room = check_length(served, int(batch.question_mask.sum()), num_reserved, param)
    return EngineRequest(question=batch, config=GenerationConfig(room))


def encode_question(model: Reasoner, question: Question) -> ReasoningBatch:
    """Return the batch of one question. Raises InputError if it cannot be encoded."""
    batch = build_questions_batch(model.tokenizer, model.recipe.data, [question])
    return batch.to(model.decoder.device)


def check_prompt(
    served: ApiModel, ids: Sequence[int], prefix: Prefix, eos_token_ids: tuple[int, ...], param: str
) -> EngineRequest:
    """Return a request for as many tokens as fit. Raises ApiError (400) for an empty, invalid or long prompt."""
    if not ids:
        raise ApiError(400, f"{param}: empty; give text", param)
    check_token_ids(served, ids, param)
    state, first = (prefix.cache, prefix.first_position) if isinstance(prefix, ChatPrefix) else (prefix, None)
    room = check_length(served, len(ids), first or 0, param)
    return EngineRequest(tuple(ids), None, GenerationConfig(room, eos_token_ids=eos_token_ids), state, first)


def check_token_ids(served: ApiModel, ids: Sequence[int], param: str) -> None:
    """Raise ApiError (400) for an id outside the vocabulary."""
    V = served.decoder.config.vocab_size
    bad = next((i for i in ids if not 0 <= i < V), None)
    if bad is not None:
        raise ApiError(400, f"{param}: id {bad} is outside the vocabulary of {V:,} ids", param)


def check_characters(served: ApiModel, num_characters: int, param: str) -> None:
    """Refuse a text that is too long even if all of its tokens are the longest; encoding megabytes takes seconds."""
    check_length(served, num_characters // served.longest_token, 0, param, f"{num_characters:,} characters")


def check_length(served: ApiModel, num_tokens: int, num_reserved: int, param: str, size: str = "") -> int:
    """Return how many tokens fit after a prompt and the positions of a memory, or of thoughts: at least one."""
    context = served.context_size
    limit = min(served.options.max_prompt_tokens or context, context - 1)
    if num_tokens > limit or num_tokens + num_reserved >= context:
        size = size or f"{num_tokens:,} tokens"
        note = f" beside {num_reserved:,} of memory or thoughts" if num_reserved and num_tokens <= limit else ""
        message = (
            f"{param}: {size}{note}, but this model's maximum context length is {context:,} tokens, and a prompt may "
            f"have at most {limit:,} (context_length_exceeded); shorten it"
        )
        raise ApiError(400, message, param, "context_length_exceeded")
    return context - num_tokens - num_reserved


def build_generation_config(
    served: ApiModel, body: GenerationRequest, prompt: EngineRequest, max_tokens: int | None
) -> GenerationConfig:
    """Return the options of generation of a request, by default the published sampling.

    `max_tokens` is lowered to the server's limit and to what fits after the prompt (in a session, after its attention
    cache, which then need not be emptied), because clients send large values for "until it ends". None: that limit.
    """
    room, state, model = prompt.config.max_tokens, prompt.state, served.model
    if isinstance(model, NestedTextModel) and isinstance(state, FastWeightState) and state.attention_cache is not None:
        left = min(room, model.attention_window - len(prompt.token_ids)) - state.attention_cache.S
        room = left if left >= MIN_ANSWER_TOKENS else room
    largest = max(1, min(room, served.options.max_generated_tokens or room))
    default = largest if prompt.question is None else ANSWER_TOKENS
    num_tokens = min(default if max_tokens is None else max_tokens, largest)
    if body.min_tokens is not None and body.min_tokens > num_tokens:
        message = f"min_tokens: {body.min_tokens:,} given, at most {num_tokens:,} tokens can be generated"
        raise ApiError(400, message, "min_tokens")
    defaults = served.published_sampling.request_defaults(body.asks_for_sampling)
    options: dict[str, Any] = {**defaults, **body.sampling_options}
    if options.get("top_p") == 0:  # the smallest set of tokens is the most likely one
        options |= {"temperature": 0.0, "top_p": 1.0}
    stop_token_ids = body.stop_token_ids or ()
    eos_token_ids = prompt.config.eos_token_ids
    check_token_ids(served, stop_token_ids, "stop_token_ids")
    if isinstance(eos_token_ids, Sequence):
        eos_token_ids = (*(() if body.ignore_eos else eos_token_ids), *stop_token_ids)
    elif body.ignore_eos or stop_token_ids:
        param = "ignore_eos" if body.ignore_eos else "stop_token_ids"
        raise ApiError(400, f"{param}: {served.name} answers questions, and its recipe ends them; remove it", param)
    return GenerationConfig(num_tokens, stop_strings=body.stop_strings, eos_token_ids=eos_token_ids, **options)


def build_sequences(
    served: ApiModel, body: GenerationRequest, prompt: EngineRequest, max_tokens: int | None
) -> list[EngineRequest]:
    """Return the `n` sequences of a prompt; sequence i samples with `seed` + i, or with a random seed."""
    config = build_generation_config(served, body, prompt, max_tokens)
    seed = secrets.randbelow(MAX_SEED) if body.seed is None else body.seed
    return [replace(prompt, config=replace(config, seed=(seed + i) % MAX_SEED)) for i in range(body.n or 1)]
