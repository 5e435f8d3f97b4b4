"""Bodies of requests: OpenAI's chat completions and completions, and laconic's memories and sessions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

# Parameters of OpenAI's and vLLM's APIs that change nothing at these values (and null). At others, a 400.
UNSUPPORTED_PARAMETERS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,), "audio": (), "best_of": (1,), "chat_template_kwargs": ({},),
    "continue_final_message": (False,), "frequency_penalty": (0,), "function_call": ("none", "auto"),
    "functions": ([],), "include_stop_str_in_output": (False,), "length_penalty": (1,), "logit_bias": ({},),
    "metadata": ({},), "modalities": (["text"],), "moderation": (), "parallel_tool_calls": (True, False),
    "prediction": (), "presence_penalty": (0,), "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"), "prompt_logprobs": (), "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},), "service_tier": ("auto", "default"), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "store": (False,), "suffix": ("",), "tool_choice": ("none", "auto"),
    "tools": ([],), "truncate_prompt_tokens": (), "use_beam_search": (False,), "verbosity": ("medium",),
    "web_search_options": (),
}  # fmt: skip
# Older versions of lm-eval send the type "text", items of OpenAI's Responses API have "message".
NEUTRAL_MESSAGE_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],), "audio": (), "function_call": (), "provider_specific_fields": ({},), "reasoning": ("",),
    "reasoning_content": ("",), "refusal": (), "tool_calls": ([],), "type": ("text", "message"),
}  # fmt: skip
CHAT_NEUTRAL = {**UNSUPPORTED_PARAMETERS, "max_tokens": (-1,), "max_completion_tokens": (-1,)}  # as in llama.cpp
IGNORED_FIELDS = ("cache_control", "id")  # of messages and their parts: hints to other servers, ids of earlier answers
MAX_FIELDS = 100  # of an object; each unknown one is an error that takes time to build
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 32
MAX_ROWS = 1024  # prompts, messages or memories of one request
NonEmptyText = Annotated[str, Field(min_length=1)]


class RequestBody(BaseModel):
    """A JSON object without unknown fields, conversions between types, NaN or infinity.

    Fields that are `ignored`, or have one of their `neutral` values or null, are left out.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, data: Any) -> Any:
        """Leave out what changes nothing, and refuse an object with more fields than any client sends."""
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise ValueError(f"an object has {len(data):,} fields; send at most {MAX_FIELDS}")
        return {
            name: value
            for name, value in data.items()
            if name not in cls.ignored
            and not (name in cls.neutral and (value is None or any(value == other for other in cls.neutral[name])))
        }


class TextPart(RequestBody):
    """A part of a message's content."""

    ignored = IGNORED_FIELDS
    type: Literal["text"]
    text: str


class ChatMessage(RequestBody):
    """A message of a conversation, without fields of answers that clients send back."""

    neutral, ignored = NEUTRAL_MESSAGE_FIELDS, IGNORED_FIELDS
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def join_parts(cls, content: Any) -> Any:
        """Join text parts with line ends, as vLLM does."""
        if not isinstance(content, list):
            return content
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                raise ValueError(f"a part of type {str(kind)[:40]!r} is not supported; give parts of type 'text'")
        return "\n".join(TextPart.model_validate(part).text for part in content)


class StreamOptions(RequestBody):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # the server may leave the padding out
    continuous_usage_stats: bool | None = None  # as in vLLM: the counts so far in every chunk


class GenerationRequest(RequestBody):
    """Parameters that chat completions and completions share."""

    neutral = UNSUPPORTED_PARAMETERS
    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None  # this and the next five as in vLLM
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_STRINGS)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0 and -1 turn it off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop: Annotated[list[NonEmptyText], Field(max_length=MAX_STOP_STRINGS)] | NonEmptyText | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ROWS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    memory: Annotated[list[str], Field(max_length=MAX_ROWS)] | str | None = None
    session: str | None = None

    @property
    def sampling_options(self) -> dict[str, Any]:
        """The sampling options that the request gives, as `GenerationConfig` names them."""
        names = ("min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        if options.get("top_k") == -1:
            options["top_k"] = 0
        return options

    @property
    def asks_for_sampling(self) -> bool:
        """Whether the request has a temperature, or parameters that have no effect without sampling."""
        has_filter = (self.top_p or 1) < 1 or (self.top_k or 0) > 1 or bool(self.min_p)
        return has_filter or bool(self.temperature) or self.seed is not None or (self.n or 1) > 1

    @property
    def memories(self) -> tuple[str, ...]:
        """The ids or names of the memories that the prompt continues."""
        return (self.memory,) if isinstance(self.memory, str) else tuple(self.memory or ())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    neutral = CHAT_NEUTRAL
    chat_template_kwargs: dict[str, Any] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ROWS, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_ROWS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_ROWS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=-1)] | None = None  # -1: until the end, as in llama.cpp
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list of texts or lists of ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[i for i in self.prompt if isinstance(i, int)]]
        return [row for row in self.prompt if not isinstance(row, int)]


class LearnRequest(RequestBody):
    """Body of POST /v1/sessions/{id}/learn."""

    text: NonEmptyText


class EmptyRequest(RequestBody):
    """Body of the routes that take no parameters; it may be left out."""


class MemoryCard(BaseModel):
    """Metadata of a stored memory; `slots` are summary vectors, or slots per KV head on average."""

    id: str
    object: Literal["memory"] = "memory"
    created: int
    name: str
    kind: Literal["kv", "summary"]
    method: str
    tokens: int
    slots: float
    bytes: int
    is_readable: bool
