"""The OpenAPI document: what the routes take, from the schema's own models, and how they answer."""

from functools import cache
from importlib.metadata import version

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse

from qjax.serving import responses, schema

REF = "#/components/schemas/"
POSTS = {
    "/v1/chat/completions": ("an answer to a conversation", [schema.ChatRequest], responses.CHAT, True),
    "/v1/completions": ("plain text goes on", [schema.CompletionRequest], responses.COMPLETION, True),
    "/tokenize": ("token ids of a text or a conversation", [schema.TokenizeText, schema.TokenizeChat], responses.TOKENS, False),
    "/detokenize": ("the text of token ids", [schema.DetokenizeRequest], responses.PROMPT, False),
}
"""What a route does, the bodies that it takes, what it answers, and whether it can stream."""
GETS = {
    "/v1/models": ("the model that is served", responses.MODELS),
    "/v1/models/{name}": ("the model of that name", responses.CARD),
    "/health": ("whether it is loading, ready or stopping", responses.HEALTH),
    "/ready": ("the same", responses.HEALTH),
    "/metrics": ("counters for Prometheus", responses.TEXT),
    "/v1/cache/stats": ("counters of every cache", responses.STATS),
    "/openapi.json": ("this document", responses.DOCUMENT),
}


async def openapi(request: Request) -> JSONResponse:
    return JSONResponse(document())


@cache
def document() -> dict:
    """OpenAPI 3.1."""
    bodies = [body for _, some, *_ in POSTS.values() for body in some]
    _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=REF + "{model}")
    paths = {path: {"get": _route(what, answer)} for path, (what, answer) in GETS.items()}
    for path, (what, some, answer, streams) in POSTS.items():
        refs = [{"$ref": REF + body.__name__} for body in some]
        content = {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}}
        paths[path] = {"post": _route(what, answer, streams) | {"requestBody": {"required": True, "content": content}}}
    tier = {"name": "tier", "in": "query", "schema": {"type": "string", "enum": ["memory", "disk", "all"], "default": "memory"}}
    paths["/v1/cache/clear"] = {"post": _route("empties the caches", responses.CLEARED) | {"parameters": [tier]}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "qjax", "version": version("qjax")},
        "paths": paths,
        "components": {
            "schemas": {**found["$defs"], "Error": responses.ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _route(what: str, answer: dict, streams: bool = False) -> dict:
    content = {"text/plain" if answer["type"] == "string" else "application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": responses.EVENT}
    fault = {"application/json": {"schema": {"$ref": REF + "Error"}}}
    found = {"200": {"description": what, "content": content}} | {
        status: {"description": words, "headers": headers, "content": fault} for status, (words, headers) in responses.FAULTS.items()
    }
    return {"summary": what, "responses": found}
