"""Prompt sets of the Hugging Face hub, streamed through the ``datasets`` library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

from engine.errors import DatasetError
from engine.prompt_files import SourceRow

_SHUFFLE_BUFFER = 10_000


@dataclass(frozen=True, slots=True)
class HubDataset:
    """Where a named prompt set lives on the hub.

    Attributes:
        repository: data set id on the hub.
        data_file: the file of the repository to read; None where the hub's own configuration says it.
    """

    repository: str
    data_file: str | None = None

    @property
    def page(self) -> str:
        return f"{constants.ENDPOINT}/datasets/{self.repository}"


HUB_DATASETS = {
    "lmsys": HubDataset("lmsys/lmsys-chat-1m"),
    "sharegpt": HubDataset("anon8231489123/ShareGPT_Vicuna_unfiltered", "ShareGPT_V3_unfiltered_cleaned_split.json"),
}


class HubRows:
    """Rows of a streamed data set, pinned to one revision."""

    def __init__(self, name: str, identity: str, stream: Any) -> None:
        """Wrap a streamed ``datasets.IterableDataset``; ``name`` is what messages call it."""
        self.name = name
        self.identity = identity
        self._stream = stream

    @property
    def count(self) -> int | None:
        """Rows of the split where its description says so."""
        splits = self._stream.info.splits or {}
        split = splits.get(str(self._stream.split))
        return split.num_examples or None if split else None

    def rows(self, start: int, seed: int | None) -> Iterator[SourceRow]:
        """Rows from ``start`` on; a seed shuffles shards and a sliding window of 10,000 rows.

        Raises:
            DatasetError: the connection was lost or the hub sent what is no data set.
        """
        stream = self._stream if seed is None else self._stream.shuffle(seed, buffer_size=_SHUFFLE_BUFFER)
        position = start
        try:
            for value in stream.skip(start):
                yield SourceRow(value, label=f"row {position + 1}")
                position += 1
        except Exception as error:
            raise _explained(error, self.name, after=position) from error


def open_hub(dataset: HubDataset) -> HubRows:
    """Check access to a hub data set and begin to stream it.

    Raises:
        DatasetError: gated, gone, offline or out of reach, and what to do about it.
    """
    # Importing it takes a second, which prompts from files need not pay.
    from datasets import load_dataset

    api = HfApi()
    try:
        # Asked first because ``datasets`` retries for half a minute before it reports the same faults.
        revision = api.dataset_info(dataset.repository).sha
        api.auth_check(dataset.repository, repo_type="dataset")
        stream = load_dataset(
            dataset.repository,
            data_files=dataset.data_file,
            split="train",
            streaming=True,
            revision=revision,
        )
    except GatedRepoError as error:
        raise DatasetError(
            f"{dataset.repository} is gated: accept its terms at {dataset.page} and set HF_TOKEN to a token "
            "of that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise DatasetError(f"{dataset.page} does not exist, or HF_TOKEN is invalid or has no access to it") from error
    except Exception as error:
        raise _explained(error, dataset.repository) from error
    return HubRows(dataset.repository, f"hub:{dataset.repository}@{revision}", stream)


def _explained(error: Exception, repository: str, after: int | None = None) -> DatasetError:
    """One line for whatever failed below; the HTTP client's errors share no public base class."""
    instead = "give demo or a local file"
    if isinstance(error, OfflineModeIsEnabled):
        return DatasetError(f"{repository} is on the hub, but offline mode is on: unset HF_HUB_OFFLINE, or {instead}")
    place = constants.ENDPOINT if after is None else f"{constants.ENDPOINT} after row {after}"
    reason = " ".join(str(error).split()) or type(error).__name__
    return DatasetError(f"cannot read {repository} from {place} ({reason}): check the network, or {instead}")
