"""One run of ``finemoe chat``: prompts in, replies and figures out, maps into the store."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import PromptError
from finemoe_cli.console import note, report_error, write, write_json
from finemoe_cli.dialogue import Dialogue, Reply
from finemoe_cli.interrupts import Interruptible
from finemoe_cli.reporting import summary_line, summary_object, traffic_text

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.steps import GenerationSettings
    from store.expert_map_store import ExpertMapStore

# Commits of fewer rows make the store slow to read.
FLUSH_ROWS = 1000
COMMANDS = """/stats  figures of the last reply and of the session
/clear  forget the conversation
/exit   leave (so does Ctrl-D)
/help   this list
Ctrl-C stops a reply; at the prompt it leaves."""


@dataclass
class ChatSession:
    """Replies of one engine to one user. ``model`` is its name; ``maps`` is None where no store is used."""

    model: str
    engine: Engine
    maps: ExpertMapStore | None
    dialogue: Dialogue
    settings: GenerationSettings
    stream: bool
    stats: bool
    _last: Reply | None = field(default=None, init=False)
    _replies: int = field(default=0, init=False)

    def answer_once(self, prompt: str, as_json: bool, interrupt: Interruptible) -> None:
        """Answer one prompt, as far as it gets until ``interrupt`` is requested, which may be before any token."""
        reply = self._reply(prompt, interrupt, quiet=as_json)
        if as_json:
            write_json(self._reply_object(reply))

    def talk(self) -> None:
        """Read prompts from the terminal until the user leaves.

        Raises:
            KeyboardInterrupt: Ctrl-C at the prompt, or a second one during a reply.
        """
        _enable_line_editing()
        note("/help lists the commands, /exit leaves")
        while (line := _ask()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        try:
            with Interruptible() as interrupt:
                self._reply(text, interrupt)
        except PromptError as error:
            report_error(str(error))
            return
        self._flush_when_due()

    def _command(self, name: str) -> None:
        if name == "/help":
            write(COMMANDS + "\n")
        elif name == "/clear":
            self.dialogue.clear()
            note("the conversation is forgotten")
        elif name == "/stats":
            write(self._session_text() + "\n")
        else:
            note(f"unknown command {name.split()[0]}; /help lists the commands")

    def _reply(self, prompt: str, interrupt: Interruptible, quiet: bool = False) -> Reply:
        show = write if self.stream and not quiet else _discard
        reply = self.dialogue.reply(prompt, self.settings, show, interrupt)
        self._last, self._replies = reply, self._replies + 1
        if not quiet:
            rest = "" if self.stream else reply.text
            write(rest if reply.text.endswith("\n") else rest + "\n")
        if reply.filled_context:
            note(f"the reply ended because the context of {self.engine.context_length:,} tokens is full")
        if self.stats:
            note(summary_line(reply.summary, self.engine.budget_bytes))
        return reply

    def _flush_when_due(self) -> None:
        if self.maps is not None and self.maps.pending >= FLUSH_ROWS:
            self.engine.drain()
            self.maps.flush()

    def _session_text(self) -> str:
        stored = "no store" if self.maps is None else f"{len(self.maps):,} maps to search"
        lines = [f"session: {self._replies} replies, {traffic_text(self.engine.traffic)}, {stored}"]
        if self._last is not None:
            lines.insert(0, f"last reply: {summary_line(self._last.summary, self.engine.budget_bytes)}")
        return "\n".join(lines)

    def _reply_object(self, reply: Reply) -> dict[str, object]:
        return {
            "text": reply.text,
            "token_ids": reply.token_ids,
            "finish_reason": reply.finish_reason,
            "summary": summary_object(reply.summary),
            "model": self.model,
            "fingerprint": self.engine.fingerprint.digest,
            "device": str(self.engine.device),
            "dtype": str(self.engine.dtype).removeprefix("torch."),
            "budget_bytes": self.engine.budget_bytes,
            "slots": self.engine.slots,
            "memory": self._memory_object(),
            "store": None if self.maps is None else self.maps.location,
        }

    def _memory_object(self) -> dict[str, int]:
        """What the model takes: on the device the budget, the dense part, the cache of a context, and a constant."""
        memory = self.engine.memory
        return {
            "device_bytes": memory.device_bytes,
            "dense_bytes": memory.dense_bytes,
            "context": memory.context,
            "cache_bytes": memory.cache_bytes,
            "working_bytes": memory.working_bytes,
            "host_bytes": memory.host_bytes,
        }


def _discard(text: str) -> None:
    pass


def _ask() -> str | None:
    """One line from the terminal, None at its end. The prompt stays out of a redirected stdout."""
    try:
        if sys.stdout.isatty():
            return input("> ")
        sys.stderr.write("> ")
        sys.stderr.flush()
        return sys.stdin.readline() or None
    except EOFError:
        write("\n")
        return None
    except UnicodeDecodeError:
        report_error("that line is not valid UTF-8 text")
        return ""


def _enable_line_editing() -> None:
    # Importing it is what gives input() history and editing; not every Python has it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
