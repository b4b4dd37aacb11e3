"""A chat in the terminal: the conversation so far, its settings, and the commands that change them.

Owns the messages. A turn that failed leaves no trace in them; one that was interrupted stays with
what had been said. Ctrl-C cancels the answer that is coming, and never ends the chat.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from ..coordinator.client import Client
from ..runtime.errors import RequestError, RltError, TooLong
from ..runtime.interfaces import Delta
from .answer import AnswerWriter, depth_line, show_end
from .ask_options import SETTINGS
from .depth_colours import depth_counts, dimmed

HELP = """\
/reset           forget the conversation
/undo            forget the last question and its answer
/system TEXT     tell the model what it is to be; without a text, nothing
/set             show the settings
/set NAME VALUE  change one, such as /set exit-threshold 0.5; without a value, back to the default
/depths          show the loops of every token of the last answer
/timeline        draw what happened when in the last answer
/quit            leave (as does Ctrl-D)
Ctrl-C stops an answer."""


class Chat:
    def __init__(
        self,
        client: Client,
        settings: dict[str, Any],
        *,
        colour: bool,
        timeout_s: float,
        depths: bool = False,
        timeline: bool = False,
    ) -> None:
        self.colour = colour
        self.messages: list[dict[str, str]] = []
        self.settings = settings
        self._client = client
        self._timeout_s = timeout_s
        self._show = {"depths": depths, "timeline": timeline}
        self._system: str | None = None
        self._last: list[Delta] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: print(HELP),
            "reset": self._reset,
            "undo": self._undo,
            "system": self._set_system,
            "set": self._set,
            "depths": lambda _: self._look_back(depths=True),
            "timeline": lambda _: self._look_back(timeline=True),
        }

    def command(self, line: str) -> None:
        name, _, rest = line.removeprefix("/").partition(" ")
        act = self._commands.get(name)
        if act is None:
            print(f"no command /{name}: /help lists them")
        else:
            act(rest.strip())

    def say(self, text: str) -> None:
        """One turn: the question, and its answer as it comes."""
        turn = {"role": "user", "content": text}
        writer, deltas, began_s = AnswerWriter(sys.stdout, colour=self.colour), [], time.monotonic()
        first = [{"role": "system", "content": self._system}] if self._system else []
        try:
            with self._client.generate(
                [*first, *self.messages, turn],
                stream=True,
                timeout_s=self._timeout_s,
                **self.settings,
            ) as stream:
                for delta in stream:
                    deltas.append(delta)
                    writer.piece(delta)
        except KeyboardInterrupt:
            writer.end()
            print(dimmed("(stopped)", self.colour))
        except (RequestError, TimeoutError) as error:
            if writer.open_line:
                writer.end()
            self._failed(error)
            return
        else:
            writer.end()
        self._take(turn, deltas, time.monotonic() - began_s, writer.num_loops)

    def _take(
        self, turn: dict[str, str], deltas: list[Delta], seconds: float, num_loops: int
    ) -> None:
        exit_depths = [depth for delta in deltas for depth in delta.exit_depths]
        if not exit_depths:
            return
        self._last = deltas
        said = "".join(delta.text for delta in deltas)
        self.messages += [turn, {"role": "assistant", "content": said}]
        later = exit_depths[1:]
        mean = f", mean {sum(later) / len(later):.2f} after the first" if later else ""
        counts = depth_counts(exit_depths, num_loops, self.colour)
        rate = f"{len(exit_depths)} tokens, {len(exit_depths) / seconds:.1f} per second; loops "
        print(dimmed(rate, self.colour) + counts + dimmed(mean, self.colour))
        if deltas[-1].finish_reason is not None:
            show_end(deltas, **self._show)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, TimeoutError):
            reason = f"no full answer within --timeout-s {self._timeout_s:g}"
        else:
            reason = f"{error.code if isinstance(error, RltError) else 'failed'}: {error}"
        hint = "\nthe conversation may have become too long: /undo or /reset" * (
            isinstance(error, TooLong) and bool(self.messages)
        )
        print(f"error: {reason}{hint}", file=sys.stderr)

    # Commands

    def _reset(self, _: str) -> None:
        self.messages, self._last = [], []
        print("forgotten")

    def _undo(self, _: str) -> None:
        print("forgotten: " + self.messages[-2]["content"] if self.messages else "nothing to undo")
        self.messages = self.messages[:-2]

    def _set_system(self, text: str) -> None:
        self._system = text or None
        print(f"system: {self._system or 'nothing'}")

    def _set(self, rest: str) -> None:
        name, _, text = rest.partition(" ")
        option = SETTINGS.get(name.removeprefix("--").replace("-", "_"))
        if not name:
            for option in SETTINGS.values():
                value = self.settings[option.attribute]
                shown = option.shown or "the default" if value is None else value
                print(f"{option.flag.removeprefix('--'):<15} {shown}")
        elif option is None:
            known = ", ".join(known.flag.removeprefix("--") for known in SETTINGS.values())
            print(f"no setting {name}: there are {known}")
        else:
            try:
                value = option.parse(text) if text and option.parse else option.real_default
                if text and option.choices and value not in option.choices:
                    raise argparse.ArgumentTypeError(f"one of {', '.join(option.choices)}")
            except argparse.ArgumentTypeError as error:
                print(f"{name}: {error}")
                return
            self.settings[option.attribute] = value
            print(f"{name}: {option.shown or 'the default' if value is None else value}")

    def _look_back(self, *, depths: bool = False, timeline: bool = False) -> None:
        if not self._last:
            print("nothing was answered yet")
        elif depths:
            print(depth_line([d for delta in self._last for d in delta.exit_depths]))
            if (length := self._last[-1].num_prompt_tokens) is not None:
                print(f"after {length} prompt tokens")
        else:
            show_end(self._last, depths=False, timeline=timeline)


def run_chat(chat: Chat) -> int:
    """Until /quit or the end of the input."""
    import readline  # noqa: F401  (gives input() its line editing and its history)

    print("/help lists the commands, Ctrl-D leaves. Colours are loops per token, blue for few.")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves)")
            continue
        if line in ("/quit", "/exit"):
            return 0
        if line.startswith("/"):
            chat.command(line)
        elif line:
            chat.say(line)
