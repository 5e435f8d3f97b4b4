"""POST /tokenize and /detokenize, as in vLLM: the ids of a prompt or of messages, and the text of ids."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from laconic.experiment.text_models.reasoner import Reasoner
from laconic.serving.http.api_error import ApiError
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.prompts import (
    check_characters,
    check_template_variables,
    check_token_ids,
    choose_question,
    encode_question,
    read_messages,
)
from laconic.serving.http.schemas import MAX_ROWS, ChatMessage, RequestBody
from laconic.serving.http.services import ServicesDependency, StrictRoute, get_deadline
from laconic.serving.http.worker import run_in_thread

NEUTRAL_PARAMETERS = {"continue_final_message": (False,), "return_token_strs": (False,)}
router = APIRouter(route_class=StrictRoute)


class TokenizeRequest(RequestBody):
    """Body of POST /tokenize, as in vLLM: a prompt or messages."""

    neutral = NEUTRAL_PARAMETERS
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ROWS, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(RequestBody):
    """Body of POST /detokenize, as in vLLM."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, services: ServicesDependency) -> dict[str, Any]:
    """Return the ids of a prompt, or of messages under the chat template, and their number."""
    services.check_model(body.model)
    async with get_deadline(request).limit():
        ids = await run_in_thread(encode, services.served, body)
    return {"count": len(ids), "max_model_len": services.served.context_size, "tokens": ids}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, services: ServicesDependency) -> dict[str, str]:
    """Return the text of ids, with special tokens."""
    services.check_model(body.model)
    check_token_ids(services.served, body.tokens, "tokens")
    async with get_deadline(request).limit():
        return {"prompt": await run_in_thread(services.served.tokenizer.decode, body.tokens, False)}


def encode(served: ApiModel, body: TokenizeRequest) -> list[int]:
    """Return the ids of a prompt or of messages; the errors are those of completions."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt or messages: give one of them", "prompt")
    if body.prompt is not None:
        check_characters(served, len(body.prompt), "prompt")
        return served.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    messages = read_messages(served, body.messages or ())
    has_reply = body.add_generation_prompt is not False
    if isinstance(served.model, Reasoner):
        if not has_reply or body.add_special_tokens:
            raise ApiError(400, f"messages: {served.name} answers questions; remove the options of templates")
        check_template_variables(served, messages, body.chat_template_kwargs)
        batch = encode_question(served.model, choose_question(served.name, served.model, messages))
        return batch.question_ids[batch.question_mask].tolist()
    variables = body.chat_template_kwargs
    text = served.tokenizer.apply_chat_template(messages, add_generation_prompt=has_reply, variables=variables)
    return served.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
