"""Finding a model's files: the bundled model, a local folder, or a snapshot from the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from engine.errors import ModelNotFoundError

BUNDLED_MODEL = "demo"

_BUNDLED_FOLDER = Path(__file__).parent / "data" / "demo-moe"
_WANTED_FILES = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "tokenizer*",
    "vocab*",
    "merges*",
    "*.tiktoken",
]
_UNWANTED_FILES = ["*/*", "consolidated*"]


def find_model_folder(name: str) -> Path:
    """The local folder of a model: ``demo``, a path, or a hub id (downloaded, or taken from the hub's cache).

    Honours HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN. Raises ModelNotFoundError, which tells a path
    that does not exist from a repository that is unknown, gated, or out of reach.
    """
    path = _find_path(name)
    if path is None:
        with _hub_errors(name):
            return Path(
                huggingface_hub.snapshot_download(name, allow_patterns=_WANTED_FILES, ignore_patterns=_UNWANTED_FILES)
            )
    if not path.is_dir():
        raise ModelNotFoundError(f"{name}: is a file; give the folder that holds the model's config.json.")
    return path


def find_config(name: str) -> Path:
    """The folder that holds a model's config.json, or such a file itself; of a hub id nothing else is fetched.

    Raises ModelNotFoundError as ``find_model_folder`` does.
    """
    path = _find_path(name)
    if path is None:
        with _hub_errors(name):
            return Path(huggingface_hub.hf_hub_download(name, "config.json"))
    return path


def _find_path(name: str) -> Path | None:
    """The bundled model's folder or the path of that name; None for what can only be a hub id."""
    if name == BUNDLED_MODEL:
        return _BUNDLED_FOLDER
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path.resolve()
        meant_as_path = _looks_like_path(name)
    except (OSError, RuntimeError) as error:
        # A name too long for the file system, a folder that may not be entered, the home of an unknown user.
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFoundError(f"{name}: cannot be looked for ({reason}); check the path.") from error
    if meant_as_path:
        raise ModelNotFoundError(f"{name}: no such folder; check the path (a hub id has the form owner/model).")
    return None


def _looks_like_path(name: str) -> bool:
    """Whether a name that does not exist was meant as a path rather than as a hub id."""
    if name.startswith((".", "~", os.sep)) or name.endswith("/") or name.count("/") > 1:
        return True
    return "/" in name and Path(name).parent.is_dir()


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Tell why a hub id cannot be had."""
    try:
        yield
    except HFValidationError as error:
        raise ModelNotFoundError(f"{name}: neither a folder nor a hub id of the form owner/model.") from error
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name}: gated on {constants.ENDPOINT}; accept its licence there, then set HF_TOKEN to your access token."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{name}: no such folder, and {constants.ENDPOINT} knows no such model; check the spelling, or set "
            "HF_TOKEN if it is private."
        ) from error
    except LocalEntryNotFoundError as error:
        offline = constants.is_offline_mode()
        reason = "HF_HUB_OFFLINE is set" if offline else f"{constants.ENDPOINT} cannot be reached"
        remedy = "unset it" if offline else "check the network"
        raise ModelNotFoundError(
            f"{name}: not in the local hub cache and {reason}; {remedy}, or give a local folder."
        ) from error
    except EntryNotFoundError as error:
        raise ModelNotFoundError(f"{name}: {constants.ENDPOINT} has no config.json of it; is it a model?") from error
    except Exception as error:
        # Hub releases differ in the HTTP library that they use, and so in the errors of a connection that breaks.
        raise ModelNotFoundError(f"{name}: download from {constants.ENDPOINT} failed ({error}); try again.") from error
