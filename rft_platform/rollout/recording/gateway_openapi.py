"""The OpenAPI document of the recording gateway."""

from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from rft_platform.inference.serving.openai_schema import ChatBody, CompletionBody


class ResponsesBody(BaseModel):
    """Body of POST /v1/responses: the fields that the gateway reads; others are passed on to the chat endpoint."""

    model_config = ConfigDict(extra="allow")

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None


BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
}


@cache
def document() -> dict[str, Any]:
    """Return the routes, their bodies and the key that they require."""
    bodies = [(model, "validation") for model in BODIES.values()]
    references, definitions = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    answers = {"200": {"description": "The answer"}, "4XX": {"description": "An error object of OpenAI's API"}}
    paths: dict[str, Any] = {
        path: {"post": {"requestBody": _json_body(references[model, "validation"]), "responses": answers}}
        for path, model in BODIES.items()
    }
    paths["/v1/models"] = {"get": {"responses": answers}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Recording gateway", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}
