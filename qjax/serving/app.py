"""The server as an ASGI application: its routes, and how they fail."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qjax.serving import admin
from qjax.serving.chat import chat
from qjax.serving.completions import completions
from qjax.serving.errors import ApiError, internal
from qjax.serving.openapi import openapi
from qjax.serving.origin import OwnPages
from qjax.serving.service import Service
from qjax.serving.stream import failed
from qjax.serving.tokens import detokenize, tokenize

log = logging.getLogger(__name__)

ROUTES = [
    Route("/v1/models", admin.models),
    Route("/v1/models/{name:path}", admin.model),
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/health", admin.health),
    Route("/ready", admin.health),
    Route("/metrics", admin.metrics),
    Route("/v1/cache/stats", admin.stats),
    Route("/v1/cache/clear", admin.clear, methods=["POST"]),
    Route("/openapi.json", openapi),
]


def application(service: Service) -> Starlette:
    """Serves a service, which its `state` has."""
    origins = list(service.config.cors_origin)
    middleware = [Middleware(Counted, service=service), Middleware(OwnPages, origins=origins, trusted=not service.keys and service.is_loopback)]
    if origins:
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    handlers = {ApiError: _refused, HTTPException: _not_here, ClientDisconnect: _gone, Exception: _broken}
    app = Starlette(routes=ROUTES, middleware=middleware, exception_handlers=handlers)
    app.state.service = service
    return app


class Counted:
    """Counts responses by route and status."""

    def __init__(self, app, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._service.metrics.responses.labels(route.path if route else "none", message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counted)


async def _refused(request: Request, error: ApiError) -> JSONResponse:
    return failed(error)


async def _not_here(request: Request, error: HTTPException) -> JSONResponse:
    words = {404: "there is no such route", 405: "this route does not take this method"}
    response = failed(ApiError(error.status_code, words.get(error.status_code, error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _broken(request: Request, error: Exception) -> JSONResponse:
    return failed(internal())  # the traceback goes to the log with the exception, which is raised on
