"""Turns token ids into text as they come: whole characters only, stop strings found and held back.

Text is decoded over a short window of the last ids, which begins where the text was complete once
before: tokens may hold parts of characters, and decoders treat the first token of a text specially.

    ids     ... | window .......................... |
    text        [ emitted ........ )[ incomplete .. )

Decoders show the bytes of an incomplete character as U+FFFD, one for all or one for each. So up to
three of them at the end of the text wait for the next token; the end of generation releases them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"
MAX_INCOMPLETE = 3
# Broken bytes, and special tokens that are left out, could go on for ever without completing the text.
MAX_WAITING_TOKENS = 16


class IncrementalDecoder:
    """Decodes a growing list of ids; what it returns, joined, is the text of them all.

    One exception: decoders with byte tokens show all of a run of them as U+FFFD where one character is
    broken. The whole ones before it were returned as they are by then.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._emitted = ""
        # Length of the window when its text was last complete; the next window begins there.
        self._num_complete = 0

    def push(self, token_id: int) -> str:
        """Adds one id and returns the characters that it completes."""
        self._window.append(token_id)
        text = self._read_window()
        complete = text.rstrip(REPLACEMENT)
        complete = text[: max(len(complete), len(text) - MAX_INCOMPLETE)]
        added = complete[len(self._emitted) :]
        self._emitted += added
        if added and complete == text:
            self._advance()
        elif len(self._window) - self._num_complete > MAX_WAITING_TOKENS:
            self._shorten(num_held=len(text) - len(complete))
        return added

    def flush(self) -> str:
        """Returns what is left, incomplete characters as U+FFFD."""
        added = self._read_window()[len(self._emitted) :]
        self._emitted += added
        return added

    def _read_window(self) -> str:
        """The text of the window, which begins with what was emitted of it."""
        text = self._decode(self._window)
        if not text.startswith(self._emitted):
            # An incomplete character makes U+FFFD of the whole ones before it: look at it alone.
            self._window = self._window[self._num_complete :]
            self._num_complete, self._emitted = 0, ""
            text = self._decode(self._window)
        return text

    def _advance(self) -> None:
        self._window = self._window[self._num_complete :]
        self._num_complete = len(self._window)
        self._emitted = self._decode(self._window)

    def _shorten(self, *, num_held: int) -> None:
        """Drops the older half of the ids that wait; the last `num_held` characters are still to come."""
        self._window[self._num_complete : -MAX_WAITING_TOKENS // 2] = []
        text = self._decode(self._window)
        self._emitted = text[: max(0, len(text) - num_held)]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that ended the text."""

    stop: str


class _Matcher:
    """Follows how much of a stop string the text ends with (the method of Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = [0] * len(stop)
        for end in range(1, len(stop)):
            self._borders[end] = self._extend(self._borders[end - 1], stop[end])

    def push(self, character: str) -> bool:
        """True where the stop string is complete."""
        self.num_matched = self._extend(self.num_matched, character)
        if self.num_matched < len(self.stop):
            return False
        self.num_matched = self._borders[-1]  # its end may begin another one
        return True

    def _extend(self, num_matched: int, character: str) -> int:
        while num_matched and self.stop[num_matched] != character:
            num_matched = self._borders[num_matched - 1]
        return num_matched + (self.stop[num_matched] == character)


class StopChecker:
    """Passes text on except what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, StopMatch | None]:
        """Returns the text that is safe to emit, and the stop string where one is complete.

        One that is complete where nothing may stop is text like any other. The match that ends first wins,
        so that the chunks the text comes in make no difference; of those that end together, the longest.
        """
        if not self._matchers:
            return text, None
        held = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.push(character)]
            if complete and may_stop:
                stop = max(complete, key=len)
                self._held = ""
                return held[: end if self._include_stop else end - len(stop)], StopMatch(stop)
        num_safe = len(held) - max(matcher.num_matched for matcher in self._matchers)
        self._held = held[num_safe:]
        return held[:num_safe], None

    def flush(self) -> str:
        """Returns the text held back, which turned out to be no stop string."""
        held, self._held = self._held, ""
        return held
