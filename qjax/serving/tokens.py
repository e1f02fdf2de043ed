"""/tokenize and /detokenize"""

import itertools

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse

from qjax.serving.errors import BadRequest
from qjax.serving.schema import DetokenizeRequest, TokenizeChat
from qjax.serving.service import Service
from qjax.serving.validation import tokenized


async def tokenize(request: Request) -> JSONResponse:
    """The ids of a text, or of a conversation as the server would run it."""
    service: Service = request.app.state.service
    caller = service.caller(request)
    asked = service.for_model(tokenized(await service.json(request)))
    engine = service.engine
    if isinstance(asked, TokenizeChat):
        ask = asked.add_generation_prompt is not False
        prompt = await run_in_threadpool(service.prompts.prompt, asked, tenant=caller.tenant(), limit=engine.limit - 1, ask=ask)
        ids = prompt.tokens.tolist()
    else:
        ids = await run_in_threadpool(engine.model.tokenizer.encode, asked.prompt)
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": engine.limit})


async def detokenize(request: Request) -> JSONResponse:
    """The text of ids."""
    service: Service = request.app.state.service
    service.caller(request)
    asked = await service.body(request, DetokenizeRequest)
    tokenizer = service.engine.model.tokenizer
    for token in itertools.islice((i for i in asked.tokens if i >= tokenizer.size), 1):
        raise BadRequest(f"token ids are 0 to {tokenizer.size - 1}: found {token if token < 1e9 else 'a larger one'}", "tokens")
    return JSONResponse({"prompt": await run_in_threadpool(tokenizer.decode, np.array(asked.tokens).tolist())})
