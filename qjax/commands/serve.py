"""`qjax serve`: an OpenAI-compatible server over one engine."""

import argparse
import logging
import sys

from rich.console import Console

from qjax.commands import console
from qjax.config import CacheConfig, DiskConfig, EngineConfig, ServeConfig
from qjax.serving.limits import Limits
from qjax.serving.server import Server, listening
from qjax.serving.service import Service
from qjax.serving.worker import FAILED


def run(args: argparse.Namespace) -> int:
    """Serves until a signal: 0 after a planned stop. What happens goes to standard error, a line each."""
    config, caches, disk = EngineConfig.from_flags(args), CacheConfig.from_flags(args), DiskConfig.from_flags(args)
    serve, limits = ServeConfig.from_flags(args), Limits.from_flags(args)
    console.check(args.model, config, caches)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    for name in ("qjax", "storage"):
        logging.getLogger(name).setLevel(logging.INFO)
    notes = Console(stderr=True, highlight=False)
    with listening(serve.host, serve.port) as listener:
        service = Service(lambda: console.start(args.model, config, notes, caches, disk), serve, limits, lambda: server.ended(), disk)
        server = Server(service, listener)
        try:
            server.run()
        finally:
            service.worker.drain(0)
    if service.worker.state == FAILED:
        raise service.worker.error
    return 0
