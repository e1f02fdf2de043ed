"""opencode as a user runs it, in a home directory of its own."""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2

from tests.clients.install import RIPGREP, installed
from tests.clients.turns import Step, Turn
from tests.serving.live import SECONDS, until

# The last three keep the files of this checkout and of this machine out of the prompts.
SETTINGS = """AUTOUPDATE MODELS_FETCH LSP_DOWNLOAD DEFAULT_PLUGINS SHARE PROJECT_CONFIG CLAUDE_CODE EXTERNAL_SKILLS""".split()
OUTPUT = 8192
"""Tokens of an answer at the most: what the embedded model says of itself, as a summary, may have no end."""
PLUGIN = {"dependencies": {"@opencode-ai/plugin": "1.18.33"}}


class Opencode:
    """folder: where it works. Sessions are kept from one run to the next."""

    def __init__(self, directory: Path, url: str, model: str, context: int):
        """url: of the server, without /v1."""
        self.folder, home = directory / "folder", directory / "home"
        self.folder.mkdir()
        config = home / ".config" / "opencode"
        # An empty node_modules and a lock that names its plugin package: else it would fetch that from the npm registry.
        (config / "node_modules").mkdir(parents=True)
        (config / "package.json").write_text(json.dumps(PLUGIN))
        (config / "package-lock.json").write_text(json.dumps({"packages": {"": PLUGIN}}))
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "qjax",
            "options": {"baseURL": f"{url}/v1", "apiKey": "none", "headerTimeout": SECONDS * 1000, "chunkTimeout": SECONDS * 1000},
            "models": {model: {"name": model, "reasoning": True, "tool_call": True, "limit": {"context": context, "output": OUTPUT}}},
        }
        name = f"qjax/{model}"
        fixed = {"autoupdate": False, "share": "disabled", "snapshot": False, "lsp": False, "formatter": False, "enabled_providers": ["qjax"]}
        self._model = {"providerID": "qjax", "modelID": model}
        self._program = installed("opencode-linux-x64-baseline") / "bin" / "opencode"
        self._environment = {
            "PATH": f"{installed('@qwen-code/qwen-code') / RIPGREP}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local" / "share"),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "XDG_STATE_HOME": str(home / ".local" / "state"),
            "OPENCODE_CONFIG_CONTENT": json.dumps(fixed | {"model": name, "small_model": name, "provider": {"qjax": provider}}),
        } | {f"OPENCODE_DISABLE_{setting}": "1" for setting in SETTINGS}

    def run(self, text: str, session: str | None = None) -> Turn:
        """One turn by `opencode run`, of a new session or one that goes on. AssertionError where it does not end with 0."""
        words = [self._program, "run", "--format", "json", *(["--session", session] if session else [])]
        # On standard input: it puts a prompt in quotes that is given as a word and has a blank in it.
        done = subprocess.run(words, cwd=self.folder, env=self._environment, input=text, capture_output=True, text=True, timeout=SECONDS)
        events = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
        assert not [event for event in events if event["type"] == "error"], done.stdout
        return _turn(events[0]["sessionID"], [event["part"] for event in events])

    @contextlib.contextmanager
    def serve(self) -> Iterator["Sessions"]:
        """Its own server, through which a conversation can be summarized and aborted."""
        log = self.folder.parent / "serve.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [self._program, "serve", "--port", "0"], cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            address = until(lambda: re.search(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text()), "address of opencode")[0]
            with httpx2.Client(base_url=address, timeout=SECONDS) as http:
                until(lambda: _answers(http), "opencode that answers")
                yield Sessions(http, self._model)
        finally:
            process.terminate()
            process.wait(SECONDS)


class Sessions:
    def __init__(self, http: httpx2.Client, model: dict):
        self._http, self._model = http, model

    def new(self) -> str:
        return self._ask("/session", {})["id"]

    def say(self, session: str, text: str) -> Turn:
        """One turn, to its end."""
        self._ask(f"/session/{session}/message", {"parts": [{"type": "text", "text": text}]})
        messages = self.messages(session)
        asked = max(i for i, message in enumerate(messages) if message["info"]["role"] == "user")
        return _turn(session, [part for message in messages[asked + 1 :] for part in message["parts"]])

    def begin(self, session: str, text: str) -> None:
        """A turn that goes on in the background."""
        self._ask(f"/session/{session}/prompt_async", {"parts": [{"type": "text", "text": text}]})

    def abort(self, session: str) -> None:
        self._ask(f"/session/{session}/abort", {})

    def summarize(self, session: str) -> None:
        self._ask(f"/session/{session}/summarize", self._model)

    def title(self, session: str) -> str:
        return self._http.get(f"/session/{session}").raise_for_status().json()["title"]

    def messages(self, session: str) -> list[dict]:
        """What the client keeps of a session: each message's `info` and `parts`."""
        return self._http.get(f"/session/{session}/message").raise_for_status().json()

    def _ask(self, path: str, body: dict):
        answer = self._http.post(path, json=body).raise_for_status()
        return answer.json() if answer.content else None


def _answers(http: httpx2.Client) -> bool:
    try:
        return http.get("/session", timeout=3).status_code == 200  # one that comes while it starts may hang
    except httpx2.TransportError:
        return False


def _turn(session: str, parts: list[dict]) -> Turn:
    kinds = {kind: [part for part in parts if part["type"] == kind] for kind in ("text", "tool", "step-finish")}
    counts = [part["tokens"] for part in kinds["step-finish"]]
    steps = [Step(t["input"] + t["cache"]["read"], t["cache"]["read"], t["output"] + t["reasoning"]) for t in counts]
    tools = [f"{part['tool']} {part['state']['status']}" for part in kinds["tool"]]
    return Turn(session, "".join(part["text"] for part in kinds["text"]), tools, steps)
