"""What a server adds to its engine: time to the first token, and time between tokens, against the same engine called in its process.

    python -m benchmarks.serving [--model embedded] [--tokens 8192] [--rounds 30] [--json]

One conversation goes on, a turn over HTTP (streamed, on loopback, the client in a process of its own) and a turn called in turns; each is a resume
that reads a new message of 60 words. The first token is counted from the request's first byte sent, so with the parsing, the rendering and the
alignment; the engine is given the tokens.
"""

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import threading
import time

from qjax.config import CacheConfig, EngineConfig, ServeConfig
from qjax.engine import Engine
from qjax.model.source import load
from qjax.sampling import Sampling
from qjax.serving.limits import Limits
from qjax.serving.schema import ChatRequest
from qjax.serving.server import Server, listening
from qjax.serving.service import Service
from qjax.serving.validation import validated

ANSWER = 256
WORDS = "the file was read and its lines show a table of values which another part of the program writes again into some list".split()


def client(port: int) -> None:
    """A client: a body a line comes in, and [seconds to the first token, from there to the last, chunks] go out."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for body in sys.stdin:
        begin = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response, came = connection.getresponse(), []
        while line := response.readline():
            if b'"reasoning"' in line or (b'"content":"' in line and b'"role"' not in line):
                came.append(time.perf_counter())
        print(json.dumps([came[0] - begin, came[-1] - came[0], len(came)]), flush=True)


class Talk:
    """The conversation, and its turns on either way."""

    def __init__(self, service: Service, port: int, tokens: int):
        self._service, self._source, self._messages = service, random.Random(0), []
        self._client = subprocess.Popen([sys.executable, "-m", "benchmarks.serving", "--client", str(port)], stdin=-1, stdout=-1, text=True)
        words = tokens
        while not self._messages:  # as many words as make so many tokens
            messages = [{"role": "user", "content": self._text(words)}]
            size = self._prompt(messages).tokens.size
            self._messages, words = (messages, words) if size <= tokens else ([], words * tokens // size)

    def close(self) -> None:
        self._client.stdin.close()
        self._client.wait()

    def _text(self, words: int) -> str:
        return " ".join(self._source.choices(WORDS, k=words))

    def _body(self, messages: list[dict]) -> dict:
        return {"messages": messages, "max_tokens": ANSWER, "temperature": 0, "stream": True}

    def _prompt(self, messages: list[dict]):
        return self._service.prompts.prompt(validated(ChatRequest, self._body(messages)))

    def go_on(self) -> None:
        """A new message; what the last answer was does not matter, so it is not sent back, and the turn parts there."""
        self._messages = [*self._messages, {"role": "assistant", "content": self._text(20)}, {"role": "user", "content": self._text(60)}]

    def over_http(self) -> list[float]:
        self._client.stdin.write(json.dumps(self._body(self._messages)) + "\n")
        self._client.stdin.flush()
        return json.loads(self._client.stdout.readline())

    def called(self) -> list[float]:
        prompt = self._prompt(self._messages)
        return self._service.worker.do(lambda engine: _run(engine, prompt))


def _run(engine: Engine, prompt) -> list[float]:
    begin, came = time.perf_counter(), []
    options = {"sampling": Sampling(), "max_tokens": ANSWER, "history": prompt.history, "user": prompt.user}
    generation = engine.generate(prompt.tokens, **options)
    for _ in generation:
        came.append(time.perf_counter())
    engine.release(generation.sequence)
    return [came[0] - begin, came[-1] - came[0], len(came)]


def measure(model: str, tokens: int, rounds: int) -> dict:
    """Medians of paired rounds, in ms; added: what the server adds to the first token, decode_ratio: its time from there over the engine's."""

    def make() -> Engine:
        engine = Engine(load(model), EngineConfig(context_tokens=tokens + 600 * (2 * rounds + 2)), CacheConfig())
        engine.model.tokenizer.stop_ids = ()  # each answer has ANSWER tokens
        return engine

    with listening("127.0.0.1", 0) as listener:
        service = Service(make, ServeConfig(), Limits(), lambda: setattr(server, "should_exit", True))
        server = Server(service, listener)
        thread = threading.Thread(target=server.run)
        thread.start()
        while service.worker.state == "loading":
            time.sleep(0.1)
        talk = Talk(service, listener.getsockname()[1], tokens)
        try:
            ways = {"http": talk.over_http, "engine": talk.called}
            found = {name: [] for name in ways}
            for number in range(rounds + 1):
                for name in list(ways) if number % 2 else list(ways)[::-1]:
                    talk.go_on()
                    found[name].append(ways[name]())
        finally:
            talk.close()
            service.worker.drain(0)
            thread.join()
    pairs = list(zip(found["http"][1:], found["engine"][1:], strict=True))  # the first round is cold
    assert all(e[2] == ANSWER for _, e in pairs)
    return {
        "model": model,
        "tokens": tokens,
        "rounds": rounds,
        "http_first_ms": 1e3 * statistics.median(h[0] for h, _ in pairs),
        "engine_first_ms": 1e3 * statistics.median(e[0] for _, e in pairs),
        "added_ms": 1e3 * statistics.median(h[0] - e[0] for h, e in pairs),
        "engine_token_ms": 1e3 * statistics.median(e[1] / (ANSWER - 1) for _, e in pairs),
        "decode_ratio": statistics.median(h[1] / e[1] for h, e in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="as `qjax serve --model` (default embedded)")
    parser.add_argument("--tokens", type=int, default=8192, help="length of the conversation at its beginning (default 8192)")
    parser.add_argument("--rounds", type=int, default=30, help="pairs of turns (default 30)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)  # what it starts of itself
    args = parser.parse_args()
    if args.client:
        client(args.client)
        return
    found = measure(args.model, args.tokens, args.rounds)
    if args.json:
        print(json.dumps(found))
        return
    print("{model}, {tokens:,} tokens and more, {rounds} pairs of turns".format(**found))
    print("first token: {http_first_ms:.1f} ms over HTTP, {engine_first_ms:.1f} ms called; added {added_ms:.1f} ms".format(**found))
    print("between tokens: {engine_token_ms:.2f} ms called; over HTTP {decode_ratio:.3f} of that".format(**found))


if __name__ == "__main__":
    main()
