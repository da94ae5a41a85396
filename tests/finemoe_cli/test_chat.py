from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import termios
from pathlib import Path

import pytest

from engine.budget import format_bytes
from engine.errors import BudgetError, DeviceError, ModelNotFoundError, PolicyError, PromptError, UsageError
from tests.engine.huge_checkpoint import write_huge_checkpoint
from tests.finemoe_cli.conftest import Outcome, Starter, end_by_ctrl_c, interrupt, run_here, run_main, wait_for

FOX = ("-p", "Tell me a story about a fox.", "--max-tokens", "12")
# Sampled without a template the demo model talks on, so that there is time to press Ctrl-C.
ENDLESS = ("-p", "Once", "--raw", "--temperature", "1", "--seed", "1", "--max-tokens", "2000")


@pytest.fixture(scope="module")
def fox(warmed: tuple[Path, Outcome]) -> Outcome:
    return run_here(warmed[0], "chat", *FOX, "--cache", "25%", "--json")


def test_json_has_text_tokens_and_figures(fox: Outcome, warmed: tuple[Path, Outcome]) -> None:
    reply = fox.json
    summary = reply["summary"]
    assert reply["text"]
    assert reply["finish_reason"] in ("stop", "length")
    assert len(reply["token_ids"]) == summary["new_tokens"] <= 12
    assert summary["prompt_tokens"] > 0
    assert min(summary["ttft"], summary["tpot"], summary["tokens_per_second"]) > 0
    for phase in ("prefill", "decode"):
        traffic = summary[phase]
        routed = traffic["hits"] + traffic["late"] + traffic["misses"]
        assert routed > 0
        assert traffic["hit_rate"] == traffic["hits"] / routed
    assert reply["store"] == warmed[1].json["store"]
    assert reply["model"] == "demo"
    memory = reply["memory"]
    parts = ("dense_bytes", "cache_bytes", "working_bytes")
    assert memory["device_bytes"] == reply["budget_bytes"] + sum(memory[name] for name in parts)
    assert (memory["context"], memory["cache_bytes"]) == (2048, 2048 * 2048)
    assert (
        f"expert cache: 25% = {reply['budget_bytes']:,} bytes (2.25 MiB), {reply['slots']} of 128 experts on cpu; "
        f"{format_bytes(memory['device_bytes'])} with the dense part, 2,048 tokens" in fox.stderr
    )


def test_text_is_the_same_streamed_or_not_with_or_without_a_store(fox: Outcome, warmed: tuple[Path, Outcome]) -> None:
    for options in ([], ["--no-stream"], ["--store", "none"], ["--cache", "100%"]):
        assert run_here(warmed[0], "chat", *FOX, *options).stdout.strip() == fox.json["text"].strip()


def test_prompt_from_stdin_and_stats(fox: Outcome, tmp_path: Path) -> None:
    outcome = run_here(tmp_path, "chat", *FOX[2:], "--stats", "--store", "none", stdin=FOX[1].encode())
    assert outcome.stdout.strip() == fox.json["text"].strip()
    (line,) = [line for line in outcome.stderr.splitlines() if "TTFT" in line]
    for word in ("tokens/s", "TPOT", "prefill hit/late/miss", "decode hit/late/miss", "moved", "2,359,296 bytes"):
        assert word in line
    assert not (tmp_path / "home").exists()


def test_a_prompt_in_chunks_is_answered_alike_with_more_traffic(fox: Outcome, tmp_path: Path) -> None:
    outcome = run_here(tmp_path, "chat", *FOX, "--cache", "25%", "--json", "--store", "none", "--prefill-chunk", "4")
    assert outcome.json["text"] == fox.json["text"]
    whole, chunked = (reply["summary"] for reply in (fox.json, outcome.json))
    assert chunked["prompt_tokens"] == whole["prompt_tokens"] > 8
    routed = [sum(summary["prefill"][name] for name in ("hits", "late", "misses")) for summary in (whole, chunked)]
    assert routed[1] > routed[0]


def test_replies_add_to_the_store(tmp_path: Path) -> None:
    reply = run_here(tmp_path, "chat", *FOX, "--json").json
    found = run_here(tmp_path, "store", "inspect", "--json").json
    assert found["maps"] == reply["summary"]["new_tokens"]
    assert [(run["kind"], run["status"]) for run in found["runs"]] == [("chat", "finished")]


def test_a_named_store_and_settings_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "config" / "finemoe").mkdir(parents=True)
    (tmp_path / "config" / "finemoe" / "config.toml").write_text('cache = "50%"\nstore = "mine"\nmodel = "demo"\n')
    outcome = run_here(tmp_path, "chat", *FOX, "--json")
    assert outcome.json["store"].endswith("-mine")
    assert "expert cache: 50% = " in outcome.stderr
    assert "no model named" not in outcome.stderr


def test_sampling_follows_its_seed(tmp_path: Path) -> None:
    def sample(seed: str) -> str:
        options = ("--temperature", "1.5", "--seed", seed, "--store", "none")
        return run_here(tmp_path, "chat", *FOX, *options).stdout

    assert sample("1") == sample("1") != sample("2")


def test_system_text_and_raw_text_change_the_prompt(fox: Outcome, tmp_path: Path) -> None:
    plain = fox.json["summary"]["prompt_tokens"]
    told = run_here(tmp_path, "chat", *FOX, "--store", "none", "--json", "--system", "Answer in one word.").json
    raw = run_here(tmp_path, "chat", *FOX, "--store", "none", "--json", "--raw").json
    assert raw["summary"]["prompt_tokens"] < plain < told["summary"]["prompt_tokens"]


def test_multi_byte_text_goes_in_and_out(tmp_path: Path) -> None:
    prompt = "Über 北京 und 🦊: erzähl mir von Zürich, größer, schöner,"
    reply = run_here(
        tmp_path, "chat", "--raw", "--store", "none", "--json", "--max-tokens", "20", stdin=prompt.encode()
    ).json
    assert reply["text"].encode()
    assert "\ufffd" not in reply["text"]


def test_greedy_says_that_sampling_options_have_no_effect(tmp_path: Path) -> None:
    outcome = run_here(tmp_path, "chat", *FOX, "--store", "none", "--top-p", "0.5")
    assert "no effect at temperature 0" in outcome.stderr


def test_any_policy_gives_the_same_text(fox: Outcome, tmp_path: Path) -> None:
    """A policy decides what is on the device when, and no token."""
    for options in (("--policy", "lru"), ("--policy", "promoe", "--store", "none")):
        outcome = run_here(tmp_path, "chat", *FOX, "--cache", "25%", *options)
        assert outcome.stdout.strip() == fox.json["text"].strip()
    outcome = run_here(tmp_path, "chat", *FOX, "--cache", "25%", FINEMOE_POLICY="map-t")
    assert outcome.stdout.strip() == fox.json["text"].strip()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "mru"), "no policy 'mru'"),
        (("--policy", "perfect"), "knows the future"),
        (("--policy", "finemoe", "--store", "none"), "no store is open"),
        (("--policy", "adaptive"), "run 'finemoe profile' first"),
        (("--policy", "hit-count"), "taught by the routing of earlier requests"),
    ],
)
def test_policies_that_cannot_run_are_refused(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=message):
        run_here(tmp_path, "chat", *FOX, *options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (("-p", "word " * 3000), PromptError, r"3,0\d\d tokens and the model's context 2,048.*shorten"),
        (("-p", "hi", "--model", "./nowhere"), ModelNotFoundError, "nowhere"),
        (("-p", "hi", "--device", "toaster"), DeviceError, "toaster"),
        (("-p", "hi", "--cache", "1KiB"), BudgetError, r"bytes"),
        (("-p", "hi", "--dtype", "int3"), UsageError, "int3"),
        (("-p", "hi", "--executor", "gpu"), UsageError, "no executor 'gpu': give auto, host, device"),
        (("-p", "hi", "--system", "a\udcff"), PromptError, "the system text is not valid UTF-8 text at character 2"),
    ],
)
def test_refusals(options: tuple[str, ...], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        run_here(tmp_path, "chat", *options)


def test_a_model_larger_than_the_machine_ends_with_one_line_and_exit_code_1(tmp_path: Path) -> None:
    folder = write_huge_checkpoint(tmp_path / "huge")
    code, outcome = run_main(tmp_path, "chat", "-p", "hi", "--model", str(folder), "--store", "none")
    assert code == 1
    (line,) = outcome.stderr.splitlines()
    assert re.fullmatch(r"error: .*huge needs 2\.3\d TiB of main memory \(experts 1\.88 TiB, .*", line)


def test_json_needs_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        run_here(tmp_path, "chat", "--json")


def test_ctrl_c_while_loading(start: Starter) -> None:
    process = start("chat", *ENDLESS)
    wait_for(process, "no model named")
    assert interrupt(process)[0] == ""


def test_ctrl_c_ends_a_reply_and_keeps_its_maps(start: Starter, tmp_path: Path) -> None:
    process = start("chat", *ENDLESS)
    assert process.stdout is not None
    assert process.stdout.read(1)
    interrupt(process)
    found = run_here(tmp_path, "store", "inspect", "--json").json
    assert found["maps"] >= 1
    assert found["runs"][0]["status"] == "interrupted"


def test_ctrl_c_before_the_first_token_is_an_empty_reply(tmp_path: Path) -> None:
    reply = run_here(tmp_path, "chat", *ENDLESS, "--json", ctrl_c_at="expert cache").json
    assert (reply["text"], reply["token_ids"], reply["finish_reason"]) == ("", [], "interrupted")
    assert reply["summary"]["new_tokens"] == 0
    found = run_here(tmp_path, "store", "inspect", "--json").json
    assert (found["maps"], found["runs"][0]["status"]) == (0, "interrupted")


class Terminal:
    """A finemoe chat at a pseudo-terminal, driven like a person would."""

    def __init__(self, start: Starter, *options: str) -> None:
        self._primary, secondary = pty.openpty()
        # So wide that no line is wrapped, which would break up the echo of what is typed.
        termios.tcsetwinsize(secondary, (50, 10_000))
        self.process: subprocess.Popen[str] = start(
            "chat", *options, stdin=secondary, stdout=secondary, stderr=secondary, start_new_session=True
        )
        os.close(secondary)

    def read_until(self, text: str) -> str:
        """What appeared up to and including ``text``."""
        seen = b""
        while text.encode() not in seen:
            try:
                seen += os.read(self._primary, 1)
            except OSError:
                raise AssertionError(f"the chat ended before {text!r} appeared: {seen.decode()}") from None
        return seen.decode()

    def enter(self, line: str) -> str:
        """Type a line and return what appears up to the next prompt."""
        os.write(self._primary, line.encode() + b"\n")
        # The terminal echoes what was typed.
        self.read_until(line)
        return self.read_until("> ")

    def type(self, keys: str) -> None:
        os.write(self._primary, keys.encode())


def test_a_conversation_at_a_terminal(start: Starter, tmp_path: Path) -> None:
    terminal = Terminal(start, "--max-tokens", "12", "--cache", "25%")
    terminal.read_until("/help lists the commands")
    terminal.read_until("> ")
    assert "/stats" in terminal.enter("/help")
    assert "unknown command /dance" in terminal.enter("/dance")
    assert "0 replies" in terminal.enter("/stats")
    assert len(terminal.enter("Tell me a story about a fox.").strip()) > 2
    first = terminal.enter("/stats")
    assert "1 replies" in first
    assert "decode hit/late/miss" in first
    assert "the conversation has" in terminal.enter("☃" * 1000)
    assert "forgotten" in terminal.enter("/clear")
    terminal.type("/exit\n")
    assert terminal.process.wait(60) == 0
    found = run_here(tmp_path, "store", "inspect", "--json").json
    assert found["maps_by_phase"]["prefill"] == 1


def test_ctrl_c_at_a_terminal(start: Starter) -> None:
    terminal = Terminal(start, *ENDLESS[2:])
    terminal.read_until("> ")
    terminal.type("Once\n")
    terminal.read_until("Once\r\n")
    # The blank is part of the reply, which then has most of its tokens before it.
    terminal.read_until(" ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.read_until("> ")
    assert "1 replies" in terminal.enter("/stats")
    assert end_by_ctrl_c(terminal.process) == 130
