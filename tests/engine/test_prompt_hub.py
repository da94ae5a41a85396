"""Hub prompt sets through the real client libraries, against a hub on the loopback interface or none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.local_hub import REVISION, LocalHub, serve

ROOT = Path(__file__).parents[2]
LMSYS = "lmsys/lmsys-chat-1m"
SHAREGPT = "anon8231489123/ShareGPT_Vicuna_unfiltered"

READ = """
import json, sys
from engine.errors import DatasetError
from engine.prompts import open_prompts

def texts(conversations):
    return [conversation.messages[0].content for conversation in conversations]

try:
    prompts = open_prompts(sys.argv[1], limit=6)
    shuffled = open_prompts(sys.argv[1], seed=5)
    print(json.dumps({
        "name": prompts.name, "identity": prompts.identity, "count": prompts.count,
        "all": texts(prompts), "resumed": texts(prompts.conversations(4)),
        "shuffled": texts(shuffled), "shuffled_resumed": texts(shuffled.conversations(4)),
    }))
except DatasetError as error:
    print(json.dumps({"error": str(error)}))
"""


def read_in_new_process(name: str, cache: Path, **environment: str) -> dict[str, object]:
    """The hub libraries read their settings once, on import; each case needs a process of its own."""
    settings = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    settings.update(HF_HOME=str(cache), PYTHONPATH=str(ROOT), NO_PROXY="127.0.0.1", **environment)
    done = subprocess.run([sys.executable, "-c", READ, name], env=settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_lmsys_is_streamed_from_one_revision_and_resumed(tmp_path: Path) -> None:
    card = (
        b"---\ndataset_info:\n  features:\n  - name: conversation\n    list:\n    - name: role\n      dtype: string\n"
    )
    card += b"    - name: content\n      dtype: string\n  splits:\n  - name: train\n    num_examples: 20\n---\n"
    rows = [{"conversation": [{"role": "user", "content": f"question {i}"}]} for i in range(20)]
    files = {"README.md": card, "train.jsonl": "\n".join(map(json.dumps, rows)).encode()}
    with serve(LocalHub(LMSYS, files)) as endpoint:
        result = read_in_new_process("lmsys", tmp_path, HF_ENDPOINT=endpoint)
    questions = [f"question {i}" for i in range(20)]
    shuffled = result["shuffled"]
    assert isinstance(shuffled, list)
    assert (result["name"], result["identity"]) == ("lmsys", f"hub:{LMSYS}@{REVISION}")
    assert (result["count"], result["all"], result["resumed"]) == (6, questions[:6], questions[4:6])
    assert sorted(shuffled) == sorted(questions) != shuffled
    assert result["shuffled_resumed"] == shuffled[4:]


def test_sharegpt_reads_its_one_file(tmp_path: Path) -> None:
    rows = [{"id": str(i), "conversations": [{"from": "human", "value": f"ask {i}"}]} for i in range(3)]
    files = {
        "README.md": b"",
        "other.json": b"[]",
        "ShareGPT_V3_unfiltered_cleaned_split.json": json.dumps(rows).encode(),
    }
    with serve(LocalHub(SHAREGPT, files)) as endpoint:
        result = read_in_new_process("sharegpt", tmp_path, HF_ENDPOINT=endpoint)
    assert (result["count"], result["all"]) == (None, ["ask 0", "ask 1", "ask 2"])


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((403, "GatedRepo"), [f"{LMSYS} is gated: accept its terms at http", f"/datasets/{LMSYS}", "HF_TOKEN"]),
        ((404, "RepoNotFound"), [f"/datasets/{LMSYS} does not exist", "HF_TOKEN"]),
        ((410, "Gone"), [f"cannot read {LMSYS} from http", "410", "give demo or a local file"]),
    ],
)
def test_a_refusal_says_what_to_do(tmp_path: Path, refusal: tuple[int, str], words: list[str]) -> None:
    with serve(LocalHub(LMSYS, {}, refusal)) as endpoint:
        result = read_in_new_process("lmsys", tmp_path, HF_ENDPOINT=endpoint)
    error = result["error"]
    assert isinstance(error, str) and "\n" not in error
    assert all(word in error for word in words), error


@pytest.mark.parametrize("name", ["lmsys", "sharegpt"])
def test_offline_mode_is_named(tmp_path: Path, name: str) -> None:
    result = read_in_new_process(name, tmp_path, HF_HUB_OFFLINE="1")
    assert "offline mode is on: unset HF_HUB_OFFLINE" in str(result["error"])


def test_a_hub_out_of_reach_is_reported(tmp_path: Path) -> None:
    with serve(LocalHub(LMSYS, {})) as endpoint:
        pass
    result = read_in_new_process("lmsys", tmp_path, HF_ENDPOINT=endpoint)
    assert f"cannot read {LMSYS} from {endpoint} (" in str(result["error"])
    assert "check the network" in str(result["error"])
