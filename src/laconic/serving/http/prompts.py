"""Prompts of requests as the engine reads them: ids, what they continue, and where they end."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from laconic.data.messages import Message
from laconic.data.reasoning.dataset import answer_prefix_ids
from laconic.errors import InputError, UsageError
from laconic.experiment.from_recipe.methods import Question
from laconic.experiment.text_models.chat_session import ChatPrefix, ChatSession
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.experiment.text_models.text_model import find_eos_ids
from laconic.generation.config import GenerationConfig
from laconic.nested.state import FastWeightState
from laconic.serving.http.api_error import ApiError
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.schemas import ChatMessage, GenerationRequest
from laconic.serving.requests import EngineRequest
from laconic.serving.thinking import list_question_ids

ANSWER_TOKENS = 128  # default max_tokens of runs that answer questions
MIN_ANSWER_TOKENS = 128  # an attention cache that leaves less room for an answer is emptied
MAX_SEED = 2**63


@dataclass(frozen=True)
class PromptPrefix:
    """What a prompt continues: a memory, or the fast weights of a session; or nothing."""

    memory: ChatPrefix | None = None
    fast_weights: FastWeightState | None = None


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt that fits the model: ids, or for runs that answer questions a question or a conversation up to it."""

    token_ids: tuple[int, ...]
    question: Question | None
    room: int  # largest number of new tokens that the context allows
    eos_token_ids: tuple[int, ...] | None  # None: the recipe's
    prefix: PromptPrefix


def prepare_text(served: ApiModel, prompt: str | Sequence[int], prefix: PromptPrefix) -> PreparedPrompt:
    """Encode a prompt to continue. Raises ApiError (400) if it is empty, too long, or has ids out of range."""
    model, tokenizer = served.model, served.tokenizer
    if isinstance(prompt, str):
        check_characters(served, len(prompt), "prompt")
    if isinstance(model, Reasoner):
        if not isinstance(prompt, str):
            raise ApiError(400, f"prompt: {served.name} answers questions; give texts, not token ids", "prompt")
        return prepare_question(served, prompt, "prompt")
    if not isinstance(prompt, str):
        ids = list(prompt)
        check_token_ids(served, ids, "prompt")
    elif prefix.memory is not None and prefix.memory.opening:  # a memory of a chat is continued as a chat
        session = ChatSession(served.decoder, tokenizer, prefix=prefix.memory)
        ids = session.encode([{"role": "user", "content": prompt}])
        return check_prompt(served, ids, prefix, session.eos_token_ids, "prompt")
    else:
        ids = tokenizer.encode(prompt, add_special_tokens=prefix == PromptPrefix())
    eos = model.stop_token_ids if isinstance(model, TextCompressor | NestedTextModel) else ()
    return check_prompt(served, ids, prefix, eos or find_eos_ids(served.decoder.config), "prompt")


def prepare_chat(served: ApiModel, chat: Sequence[ChatMessage], prefix: PromptPrefix) -> PreparedPrompt:
    """Encode messages with the chat template; a run that answers questions encodes them in its recipe's format.

    Raises ApiError: 400 if the model does not chat, the template rejects the messages, or they are too long.
    """
    messages = read_messages(served, chat)
    if isinstance(served.model, Reasoner):
        return prepare_question(served, choose_question(served.name, served.model, messages), "messages")
    try:
        session = ChatSession(served.decoder, served.tokenizer, prefix=prefix.memory)
        ids = session.encode(messages)
    except (InputError, UsageError) as error:
        raise ApiError(400, f"messages: {error}", "messages") from None
    return check_prompt(served, ids, prefix, session.eos_token_ids, "messages")


def read_messages(served: ApiModel, chat: Sequence[ChatMessage]) -> list[Message]:
    """Return messages whose role developer, OpenAI's newer name of system, is one that the template knows.

    Raises ApiError: 400 if they are too long, or if the model has no template.
    """
    template = served.tokenizer.chat_template
    if template is None and not isinstance(served.model, Reasoner):
        raise ApiError(400, f"{served.name} has no chat template; send a prompt, as to /v1/completions", "messages")
    check_characters(served, sum(len(message.content) for message in chat), "messages")
    new_roles = {} if "developer" in (template or "") else {"developer": "system"}
    return [{**m.model_dump(exclude_none=True), "role": new_roles.get(m.role, m.role)} for m in chat]


def choose_question(name: str, model: Reasoner, messages: Sequence[Message]) -> Question:
    """Return what a run was trained to answer: a whole conversation, or the text of its only message.

    Raises ApiError: 400 if the last message is not the user's, or for a history where the recipe's format has none.
    """
    role, row_format = messages[-1]["role"], model.recipe.data.format
    if role != "user":
        message = f"messages: the last one has role {role}; end with the question, with role user"
        raise ApiError(400, message, "messages")
    if row_format == "chat":
        return messages
    if len(messages) > 1:
        message = f'{name} was trained on single questions (data.format = "{row_format}"); give one message'
        raise ApiError(400, f"messages: {message}", "messages")
    return messages[0]["content"]


def prepare_question(served: ApiModel, question: Question, param: str) -> PreparedPrompt:
    """Check a question. Raises ApiError (400) if it is too long or cannot be encoded."""
    assert isinstance(served.model, Reasoner)
    try:
        num_tokens = len(list_question_ids(served.model, question))
    except InputError as error:
        raise ApiError(400, f"{param}: {error}", param) from None
    recipe, room = served.model.recipe, check_length(served, num_tokens, PromptPrefix(), param)
    room -= recipe.num_latent_positions + len(answer_prefix_ids(served.tokenizer, recipe.data))
    if room < 1:
        message = f"{param}: {num_tokens:,} tokens leave no room for thoughts and an answer; shorten it"
        raise ApiError(400, message, param, "context_length_exceeded")
    return PreparedPrompt((), question, room, None, PromptPrefix())


def check_prompt(
    served: ApiModel, ids: Sequence[int], prefix: PromptPrefix, eos_token_ids: tuple[int, ...], param: str
) -> PreparedPrompt:
    """Return a prompt whose length fits. Raises ApiError (400) if it is empty or too long."""
    if not ids:
        raise ApiError(400, f"{param}: empty; give text", param)
    return PreparedPrompt(tuple(ids), None, check_length(served, len(ids), prefix, param), eos_token_ids, prefix)


def check_token_ids(served: ApiModel, ids: Sequence[int], param: str) -> None:
    """Raise ApiError (400) for an id outside the vocabulary."""
    V = served.decoder.config.vocab_size
    bad = next((i for i in ids if not 0 <= i < V), None)
    if bad is not None:
        raise ApiError(400, f"{param}: id {bad} is outside the vocabulary of {V:,} ids", param)


def check_characters(served: ApiModel, num_characters: int, param: str) -> None:
    """Raise ApiError (400) for a text that would be too long if each of its tokens were the longest; encoding takes
    seconds for megabytes.
    """
    limit = min(served.options.max_prompt_tokens or served.context_size, served.context_size)
    if num_characters > limit * served.longest_token:
        raise build_length_error(served, f"{param}: {num_characters:,} characters", limit, param)


def build_length_error(served: ApiModel, size: str, limit: int, param: str) -> ApiError:
    """Return the error for a prompt that is too long, with the words by which clients recognise it."""
    message = (
        f"{size}, but this model's maximum context length is {served.context_size:,} tokens, and a prompt may have at "
        f"most {min(limit, served.context_size - 1):,} (context_length_exceeded); shorten it"
    )
    return ApiError(400, message, param, "context_length_exceeded")


def check_length(served: ApiModel, num_tokens: int, prefix: PromptPrefix, param: str) -> int:
    """Return how many tokens fit after a prompt. Raises ApiError (400) if it is too long."""
    context, memory = served.context_size, 0 if prefix.memory is None else prefix.memory.first_position or 0
    limit = served.options.max_prompt_tokens or context
    if num_tokens > limit or num_tokens + memory >= context:
        note = f" with its memory of {memory:,}" if memory and num_tokens <= limit else ""
        raise build_length_error(served, f"{param}: {num_tokens:,} tokens{note}", limit, param)
    return context - num_tokens - memory


def build_generation_config(
    served: ApiModel, body: GenerationRequest, prompt: PreparedPrompt, max_tokens: int | None
) -> GenerationConfig:
    """Return the options of generation of a request, by default the published sampling.

    `max_tokens` is lowered to the server's limit and to what fits after the prompt (in a session, after its attention
    cache, which then need not be emptied), because clients send large values for "until it ends". None: that limit.
    Raises ApiError: 400 if `min_tokens` is over `max_tokens`, or if a question comes with other ends of the answer.
    """
    room, fast_weights = prompt.room, prompt.prefix.fast_weights
    cache = None if fast_weights is None else fast_weights.attention_cache
    if cache is not None and isinstance(served.model, NestedTextModel):
        left = min(room, served.model.attention_window - len(prompt.token_ids)) - cache.S
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
    check_token_ids(served, body.stop_token_ids or (), "stop_token_ids")
    eos_token_ids = prompt.eos_token_ids
    if eos_token_ids is not None:
        eos_token_ids = (*(() if body.ignore_eos else eos_token_ids), *(body.stop_token_ids or ()))
    elif body.ignore_eos or body.stop_token_ids:
        param = "ignore_eos" if body.ignore_eos else "stop_token_ids"
        raise ApiError(400, f"{param}: {served.name} answers questions, and its recipe ends them; remove it", param)
    return GenerationConfig(num_tokens, stop_strings=body.stop_strings, eos_token_ids=eos_token_ids, **options)


def build_engine_requests(
    served: ApiModel,
    body: GenerationRequest,
    prompt: PreparedPrompt,
    max_tokens: int | None,
    *,
    num_top_logprobs: int = 0,
    with_prompt_logprobs: bool = False,
) -> list[EngineRequest]:
    """Return the `n` sequences of a prompt; sequence i samples with `seed` + i, or with a random seed."""
    config = build_generation_config(served, body, prompt, max_tokens)
    seed = secrets.randbelow(MAX_SEED) if body.seed is None else body.seed
    state, first_position = prompt.prefix.fast_weights, None
    if prompt.prefix.memory is not None:
        state, first_position = prompt.prefix.memory.cache, prompt.prefix.memory.first_position
    return [
        EngineRequest(
            token_ids=prompt.token_ids,
            question=prompt.question,
            config=replace(config, seed=(seed + index) % MAX_SEED),
            state=state,
            first_position=first_position,
            num_top_logprobs=num_top_logprobs,
            with_prompt_logprobs=with_prompt_logprobs,
        )
        for index in range(body.n or 1)
    ]
