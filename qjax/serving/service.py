"""What the routes of one server share."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import xxhash
from starlette.requests import Request

from qjax.config import DiskConfig, ServeConfig
from qjax.engine import Engine
from qjax.serving.archive import Archive
from qjax.serving.errors import ModelNotFound
from qjax.serving.keys import Caller, Keys, is_loopback
from qjax.serving.limits import Limits, read
from qjax.serving.metrics import Metrics
from qjax.serving.prompts import Prompts
from qjax.serving.schema import Body
from qjax.serving.side import Side
from qjax.serving.validation import B, validated
from qjax.serving.worker import Worker

log = logging.getLogger(__name__)

ORIGIN = re.compile(r"https?://[^/\s@]+")


class Service:
    """An engine behind HTTP. prompts: once it is loaded."""

    def __init__(
        self,
        load: Callable[[], Engine],
        config: ServeConfig,
        limits: Limits,
        when_ended: Callable[[], None] = lambda: None,
        disk: DiskConfig | None = None,
    ):
        """Starts loading. disk: the engine's; the answers that lie beside its conversations are read, and where it writes conversations they are
        written at the end. when_ended: called where the engine's thread ends. ValueError for keys that are none, for an address or pages that
        let everyone in where there is no key, and for a rule that is no regular expression.
        """
        self.config, self.limits, self.started = config, limits, int(time.time())
        self.keys = Keys.of(config.api_key, config.key_file, config.admin_key)
        if not (self.keys or self.is_loopback or config.allow_anyone):
            raise ValueError(f"without a key (--api-key, --key-file) only this machine may be served, not {config.host} (--allow-anyone)")
        for origin in config.cors_origin:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"--cors-origin must be an origin as browsers write it, https://page.example, or *, not {origin!r}")
        if "*" in config.cors_origin and not (self.keys or config.allow_anyone):
            raise ValueError("without a key (--api-key, --key-file) not every web page may be served, --cors-origin * (--allow-anyone)")
        self.side = Side(config.side_request, config.side_max_tokens)
        self.prompts: Prompts | None = None
        self._load, self._disk, self._tasks, self._when_ended = load, disk, set(), when_ended
        self._archive: Archive | None = None
        self._archives = False  # whether the file is this server's to write
        self.worker = Worker(self._loaded, config.queue, self._ended)
        self.metrics = Metrics(self.worker)

    def _loaded(self) -> Engine:
        engine = self._load()
        self.prompts = Prompts(engine.model, align=self.config.end_align, reasoning=self.config.end_align_reasoning)
        nvme = engine.caches.nvme
        if self._disk and self.prompts.records is not None and nvme and "://" not in self._disk.disk_cache:
            model, self._archives = engine.model, nvme.spills
            good_for = xxhash.xxh3_128_hexdigest(f"{model.tokenizer.digest}\n{model.template.source}".encode())
            self._archive = Archive(Path(self._disk.of_model(model.name).disk_cache), good_for)
            self._archive.load(self.prompts.records)
        return engine

    def _ended(self) -> None:
        if self._archives:
            self._archive.save(self.prompts.records)
        self._when_ended()

    @property
    def engine(self) -> Engine:
        """Raises Unavailable while there is none."""
        self.worker.check()
        return self.worker.engine

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        return self.config.host == "localhost" or is_loopback(self.config.host)

    @property
    def name(self) -> str:
        """The model's name for clients. Raises Unavailable."""
        engine = self.engine
        return self.config.model_name or engine.model.name

    def caller(self, request: Request) -> Caller:
        """Raises Unauthorized."""
        return self.keys.caller(request.headers.get("authorization"))

    def administrate(self, request: Request) -> None:
        """Raises Unauthorized and Forbidden for a caller who is not the administrator."""
        self.keys.administrate(request.headers.get("authorization"), request.client.host if request.client else None)

    async def json(self, request: Request) -> dict:
        """The JSON object of a request's body. Raises BadRequest and TooLarge."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (error := self.limits.too_long(int(declared))):
            raise error  # before any of it is asked for
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if error := self.limits.too_long(size):
                raise error
        return read(b"".join(parts), self.limits)

    async def body(self, request: Request, form: type[B]) -> B:
        """The body, of a caller who may ask and for the model that is served."""
        return self.for_model(validated(form, await self.json(request)))

    def for_model(self, body: Body) -> Body:
        """The same body. Raises ModelNotFound for another model than the one that is served, Unavailable while there is none."""
        if body.model not in (None, "", self.name):
            raise ModelNotFound(body.model, self.name)
        return body

    def clear(self, tier: str) -> None:
        """Empties the caches in "memory", on "disk", or "all"; with those in memory the answers on record. Raises Unavailable."""
        self.worker.check()
        if tier != "disk":
            self.prompts.clear()
        if tier != "memory" and self._archives:
            self._archive.remove()
        self.worker.do(lambda engine: engine.caches.clear(memory=tier != "disk", files=tier != "memory"))

    def spawn(self, work: Coroutine) -> asyncio.Task:
        """Runs a coroutine in the background, to its end."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
