"""Stop strings over streamed text."""

from collections.abc import Sequence


class StopStrings:
    """Ends a text at the stop string that is complete first, however the text is cut into pieces.

    The text ends before the occurrence whose *last* character comes first; of two that end together, before the longer one. That is what a
    reader sees who is given one character at a time, so no way of cutting the text into tokens changes it. Text that may still turn out to
    be the beginning of a stop string is held back: what was emitted is never taken back. held: that text.
    """

    def __init__(self, stops: Sequence[str] | str):
        """ValueError for an empty stop string, which would stop everything."""
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if not all(isinstance(stop, str) and stop for stop in self.stops):
            raise ValueError(f"stop strings must be texts of at least one character, not {list(self.stops)!r}")
        self.held = ""
        self._stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; returns (what may be shown now, whether a stop string is complete). After a stop everything is dropped."""
        if self._stopped:
            return "", True
        text = self.held + text
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.held, self._stopped = "", True
            return text[: min(found)[1]], True
        kept = len(text) - max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[kept:]
        return text[:kept], False

    def flush(self) -> str:
        """What is still held back when the generation ends without a stop string."""
        text, self.held = self.held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
