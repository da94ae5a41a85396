"""Hub prompt sets through the real client libraries, against a hub on the loopback interface or none."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

def read(name):
    try:
        prompts = open_prompts(name, limit=6)
        shuffled = open_prompts(name, seed=5)
        return {
            "name": prompts.name, "identity": prompts.identity, "count": prompts.count,
            "all": texts(prompts), "resumed": texts(prompts.conversations(4)),
            "shuffled": texts(shuffled), "shuffled_resumed": texts(shuffled.conversations(4)),
        }
    except DatasetError as error:
        return {"error": str(error)}

for line in sys.stdin:
    print(json.dumps(read(line.strip())), flush=True)
"""

Reader = Callable[[str], dict[str, object]]


@contextmanager
def reader(cache: Path, **environment: str) -> Iterator[Reader]:
    """Reads prompt sets by name in a process of its own: the hub libraries read their settings once, on import."""
    settings = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    settings.update(HF_HOME=str(cache), PYTHONPATH=str(ROOT), NO_PROXY="127.0.0.1", **environment)
    with subprocess.Popen(
        [sys.executable, "-c", READ], env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def read(name: str) -> dict[str, object]:
            assert process.stdin is not None and process.stdout is not None
            print(name, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        try:
            yield read
        finally:
            process.kill()


@pytest.fixture(scope="module")
def hub_reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, LocalHub], Reader]]:
    """A hub of both data sets, by id, and a reader of it. Tests give them files, or make them refuse."""
    hubs = {name: LocalHub(name, {}) for name in (LMSYS, SHAREGPT)}
    with serve(*hubs.values()) as endpoint, reader(tmp_path_factory.mktemp("hub"), HF_ENDPOINT=endpoint) as read:
        yield hubs, read


def test_lmsys_is_streamed_from_one_revision_and_resumed(hub_reader: tuple[dict[str, LocalHub], Reader]) -> None:
    hubs, read = hub_reader
    card = (
        b"---\ndataset_info:\n  features:\n  - name: conversation\n    list:\n    - name: role\n      dtype: string\n"
    )
    card += b"    - name: content\n      dtype: string\n  splits:\n  - name: train\n    num_examples: 20\n---\n"
    rows = [{"conversation": [{"role": "user", "content": f"question {i}"}]} for i in range(20)]
    hubs[LMSYS].files = {"README.md": card, "train.jsonl": "\n".join(map(json.dumps, rows)).encode()}
    result = read("lmsys")
    questions = [f"question {i}" for i in range(20)]
    shuffled = result["shuffled"]
    assert isinstance(shuffled, list)
    assert (result["name"], result["identity"]) == ("lmsys", f"hub:{LMSYS}@{REVISION}")
    assert (result["count"], result["all"], result["resumed"]) == (6, questions[:6], questions[4:6])
    assert sorted(shuffled) == sorted(questions) != shuffled
    assert result["shuffled_resumed"] == shuffled[4:]


def test_sharegpt_reads_its_one_file(hub_reader: tuple[dict[str, LocalHub], Reader]) -> None:
    hubs, read = hub_reader
    rows = [{"id": str(i), "conversations": [{"from": "human", "value": f"ask {i}"}]} for i in range(3)]
    hubs[SHAREGPT].files = {
        "README.md": b"",
        "other.json": b"[]",
        "ShareGPT_V3_unfiltered_cleaned_split.json": json.dumps(rows).encode(),
    }
    result = read("sharegpt")
    assert (result["count"], result["all"]) == (None, ["ask 0", "ask 1", "ask 2"])


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((403, "GatedRepo"), [f"{LMSYS} is gated: accept its terms at http", f"/datasets/{LMSYS}", "HF_TOKEN"]),
        ((404, "RepoNotFound"), [f"/datasets/{LMSYS} does not exist", "HF_TOKEN"]),
        ((410, "Gone"), [f"cannot read {LMSYS} from http", "410", "give demo or a local file"]),
    ],
)
def test_a_refusal_says_what_to_do(
    hub_reader: tuple[dict[str, LocalHub], Reader],
    refusal: tuple[int, str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hubs, read = hub_reader
    monkeypatch.setattr(hubs[LMSYS], "refusal", refusal)
    error = read("lmsys")["error"]
    assert isinstance(error, str) and "\n" not in error
    assert all(word in error for word in words), error


def test_offline_mode_is_named(tmp_path: Path) -> None:
    with reader(tmp_path, HF_HUB_OFFLINE="1") as read:
        for name in ("lmsys", "sharegpt"):
            assert "offline mode is on: unset HF_HUB_OFFLINE" in str(read(name)["error"])


def test_a_hub_out_of_reach_is_reported(tmp_path: Path) -> None:
    with serve(LocalHub(LMSYS, {})) as endpoint:
        pass
    with reader(tmp_path, HF_ENDPOINT=endpoint) as read:
        result = read("lmsys")
    assert f"cannot read {LMSYS} from {endpoint} (" in str(result["error"])
    assert "check the network" in str(result["error"])
