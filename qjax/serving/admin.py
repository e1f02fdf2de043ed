"""What is asked about the server itself: its model, its state, its counters; and emptying its caches."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from qjax.serving.errors import BadRequest, ModelNotFound
from qjax.serving.service import Service

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
TIERS = ("memory", "disk", "all")


def card(service: Service) -> dict:
    """A model as /v1/models shows it. max_model_len: tokens of a prompt and its answer together."""
    engine = service.engine
    return {"id": service.name, "object": "model", "created": service.started, "owned_by": "qjax", "max_model_len": engine.limit}


async def models(request: Request) -> JSONResponse:
    service: Service = request.app.state.service
    service.caller(request)
    return JSONResponse({"object": "list", "data": [card(service)]})


async def model(request: Request) -> JSONResponse:
    service: Service = request.app.state.service
    service.caller(request)
    if (name := request.path_params["name"]) != service.name:
        raise ModelNotFound(name, service.name)
    return JSONResponse(card(service))


async def health(request: Request) -> JSONResponse:
    """Also /ready."""
    service: Service = request.app.state.service
    return JSONResponse({"status": service.worker.state, "model": service.name})


async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    service.administrate(request)
    return Response(await run_in_threadpool(service.metrics.text), media_type=PROMETHEUS)


async def stats(request: Request) -> JSONResponse:
    """Counters of every cache, by its name."""
    service: Service = request.app.state.service
    service.administrate(request)
    return JSONResponse(await run_in_threadpool(service.worker.do, lambda engine: engine.caches.stats()))


async def clear(request: Request) -> JSONResponse:
    """Empties the caches in memory; with ?tier=disk that on NVMe, with ?tier=all both. The tier may stand in a JSON body, too."""
    service: Service = request.app.state.service
    service.administrate(request)
    asked = {"tier": "memory"} | dict(request.query_params)
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        asked |= await service.json(request)
    if asked.keys() != {"tier"}:
        raise BadRequest("expected tier and nothing else, found more")
    tier = asked["tier"]
    if tier not in TIERS:
        raise BadRequest(f"tier: expected {', '.join(TIERS[:-1])} or {TIERS[-1]}, found another", "tier")
    await run_in_threadpool(service.clear, tier)
    return JSONResponse({"cleared": tier})
