from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.errors import DatasetError, PromptError, UsageError
from engine.prompts import open_prompts
from engine.source import resolve_model
from finemoe_cli.warming import iterate_prompts
from tests.finemoe_cli.conftest import Outcome, Starter, interrupt, run_here, wait_for

QUICK = ("--max-new-tokens", "4", "--json")


def write_prompts(folder: Path, *prompts: str) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return str(file)


def test_reports_what_it_kept(warmed: tuple[Path, Outcome]) -> None:
    folder, outcome = warmed
    report = outcome.json
    prompts = len(list(iterate_prompts(open_prompts("demo", limit=4))))
    assert report["status"] == "finished"
    assert report["prompts"] == report["completed"] == prompts >= 4
    # A map for every iteration: the prefill gives a prompt's first token.
    assert report["tokens"] == report["maps_kept"] + report["maps_replaced"] == report["maps"] <= 8 * prompts
    assert report["prompts_per_second"] > 0
    assert report["store"].startswith(str(folder / "home"))
    assert "no model named: using the bundled demo model" in outcome.stderr
    assert "expert cache: auto = " in outcome.stderr


def test_the_same_command_has_nothing_left_to_do(tmp_path: Path) -> None:
    command = ("warm", "--dataset", write_prompts(tmp_path, "One.", "Two."), *QUICK)
    first = run_here(tmp_path, *command).json
    again = run_here(tmp_path, *command)
    assert "done already" in again.stderr
    assert "expert cache" not in again.stderr
    assert (again.json["prompts"], again.json["maps_kept"]) == (0, 0)
    assert (again.json["completed"], again.json["maps"]) == (2, first["maps"])


def test_a_larger_limit_adds_to_a_smaller_one(tmp_path: Path) -> None:
    command = ("warm", "--dataset", write_prompts(tmp_path, "One.", "Two.", "Three."), *QUICK)
    first = run_here(tmp_path, *command, "--limit", "1").json
    second = run_here(tmp_path, *command, "--batch", "2").json
    assert (first["completed"], second["resumed_from"], second["completed"]) == (1, 1, 3)
    assert second["maps"] == first["maps_kept"] + second["maps_kept"]
    assert second["run"] == first["run"]


def test_other_prompts_or_settings_begin_anew(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, "One.")
    first = run_here(tmp_path, "warm", "--dataset", prompts, *QUICK).json
    longer = run_here(tmp_path, "warm", "--dataset", prompts, "--max-new-tokens", "5", "--json").json
    write_prompts(tmp_path, "Another.")
    changed = run_here(tmp_path, "warm", "--dataset", prompts, *QUICK).json
    assert [first["resumed_from"], longer["resumed_from"], changed["resumed_from"]] == [0, 0, 0]
    assert changed["maps"] == sum(report["maps_kept"] for report in (first, longer, changed))


def test_capacity_bounds_the_store(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, "One fish.", "Two birds.", "Three stones.")
    report = run_here(tmp_path, "warm", "--dataset", prompts, *QUICK, "--capacity", "5").json
    assert (report["maps"], report["capacity"]) == (5, 5)
    assert report["maps_replaced"] == report["tokens"] - 5


def test_a_long_prompt_loses_its_beginning(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, "word " * 3000, "Short.")
    text = run_here(tmp_path, "warm", "--dataset", prompts, "--max-new-tokens", "2", "--batch", "2").stdout
    assert "2 now, 2 in all, 1 cut to the context" in text


def test_a_bad_row_stops_the_run_and_keeps_what_is_done(tmp_path: Path) -> None:
    file = Path(write_prompts(tmp_path, "One.", "Two."))
    with file.open("a") as lines:
        lines.write('{"prompt": \n' + json.dumps({"prompt": "Four."}) + "\n")
    command = ("warm", "--dataset", str(file), *QUICK)
    with pytest.raises(DatasetError, match=r"prompts\.jsonl, line 3: "):
        run_here(tmp_path, *command)
    rest = run_here(tmp_path, *command, "--skip-bad")
    assert "skipped: " in rest.stderr
    assert "line 3" in rest.stderr
    assert (rest.json["resumed_from"], rest.json["completed"], rest.json["rows_skipped"]) == (2, 3, 1)


def test_prompts_that_the_chat_template_refuses_stop_the_run_or_are_passed_over(tmp_path: Path) -> None:
    model = tmp_path / "strict"
    shutil.copytree(resolve_model("demo").folder, model)
    template = model / "chat_template.jinja"
    refusal = "{% if 'secret' in messages[0]['content'] %}{{ raise_exception('no secrets') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    prompts = write_prompts(tmp_path, "One.", "Two.", "A secret.", "Four.", "Five.")
    command = ("warm", "--model", str(model), "--dataset", prompts, *QUICK)
    with pytest.raises(PromptError, match="refuses the conversation: no secrets"):
        run_here(tmp_path, *command)
    first = run_here(tmp_path, *command, "--skip-bad", "--limit", "3", "--batch", "4")
    assert "skipped: a prompt of conversation 3: the model's chat template refuses" in first.stderr
    assert first.json["completed"] == 3
    rest = run_here(tmp_path, *command, "--skip-bad", "--batch", "4").json
    assert (rest["resumed_from"], rest["completed"], rest["prompts"]) == (3, 5, 2)
    one_by_one = run_here(tmp_path / "other", *command, "--skip-bad").json
    assert (one_by_one["prompts"], one_by_one["prompts_refused"], one_by_one["completed"]) == (4, 1, 5)
    assert one_by_one["maps"] == rest["maps"]


def test_seed_shuffles(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, *(f"Number {n}." for n in range(20)))
    ordered = run_here(tmp_path, "warm", "--dataset", prompts, *QUICK, "--limit", "2").json
    drawn = run_here(tmp_path, "warm", "--dataset", prompts, *QUICK, "--limit", "2", "--seed", "7").json
    assert drawn["run"] != ordered["run"]
    assert drawn["resumed_from"] == 0


def test_more_tokens_than_the_context_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leaves no room for a prompt in the model's context of 2048"):
        run_here(tmp_path, "warm", "--dataset", "demo", "--max-new-tokens", "2048")


def test_a_reader_of_the_notes_that_leaves_ends_the_run_and_keeps_its_maps(start: Starter, tmp_path: Path) -> None:
    process = start("warm", "--dataset", "demo", "--batch", "64", "--capacity", "100000", "--max-new-tokens", "18")
    assert process.stderr is not None
    wait_for(process, "expert cache")
    # The next note, after the first commit, finds nobody.
    process.stderr.close()
    assert process.wait(60) == 1
    (run,) = run_here(tmp_path, "store", "inspect", "--json").json["runs"]
    assert run["completed"] >= 64
    assert run["status"] == "interrupted"


def test_kill_and_ctrl_c_lose_nothing_that_was_kept(start: Starter, tmp_path: Path) -> None:
    command = ("warm", "--dataset", "demo", "--batch", "64", "--capacity", "100000", "--max-new-tokens", "18")
    killed = start(*command)
    # Without a terminal a line follows every commit: "48 prompts done, 1.8 prompts/s, 1,387 maps kept, ...".
    line = wait_for(killed, "maps kept")
    killed.kill()
    killed.wait()
    completed = int(line.split(" prompts done")[0])
    kept = int(line.split(", ")[2].split()[0].replace(",", ""))
    found = run_here(tmp_path, "store", "inspect", "--json").json
    assert found["maps"] >= kept > 0
    (run,) = found["runs"]
    assert run["completed"] >= completed >= 64

    resumed = start(*command, "--json")
    assert f"going on after {run['completed']} prompts" in wait_for(resumed, "going on")
    wait_for(resumed, "expert cache")
    stdout, stderr = interrupt(resumed)
    report = json.loads(stdout)
    assert (report["status"], report["resumed_from"]) == ("interrupted", run["completed"])
    assert report["maps"] == found["maps"] + report["maps_kept"]
    assert f"interrupted: {report['completed']} prompts are kept; the same command goes on" in stderr
    assert run_here(tmp_path, "store", "inspect", "--json").json["runs"][0]["status"] == "interrupted"
