"""The safetensors files of a checkpoint: where each tensor lies, checked without reading a weight."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """One tensor of a checkpoint: its name there, the file, and its bytes in it (row-major)."""

    key: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The header of one safetensors file: its raw JSON text and the tensors it lists."""

    file: Path
    header: bytes
    tensors: tuple[TensorLocation, ...]


def find_shards(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint folder, in name order.

    Raises CheckpointError if there is none, the index is unreadable, or a file that it names is missing.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        files = tuple(sorted(folder.glob("model*.safetensors")))
        if not files:
            raise CheckpointError(
                f"{folder}: no model.safetensors and no {INDEX_NAME}; finemoe reads safetensors checkpoints only, "
                "so convert other formats with save_pretrained first."
            )
        return files
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({error}); download it again.") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} shards named by {INDEX_NAME} are missing, first "
            f"{missing[0]}; download the model again."
        )
    return tuple(folder / name for name in names)


def read_shard(file: Path) -> Shard:
    """Read and check one file's header; raises CheckpointError if it is damaged or the file is cut short."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 0 < header_length <= size - _LENGTH_BYTES:
            raise CheckpointError(
                f"{file}: damaged header (states {header_length} bytes in a file of {size}); download the file again."
            )
        header = stream.read(header_length)
    start = _LENGTH_BYTES + header_length
    try:
        entries = {key: entry for key, entry in json.loads(header).items() if key != "__metadata__"}
        tensors = tuple(_locate(file, key, entry, start) for key, entry in entries.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: damaged header ({error!r}); download the file again.") from error
    end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=start)
    if end != size:
        raise CheckpointError(f"{file}: {size} bytes long where its header states {end}; download the file again.")
    return Shard(file, header, tensors)


def _locate(file: Path, key: str, entry: dict, start: int) -> TensorLocation:
    begin, end = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    if end - begin != nbytes:
        raise ValueError(f"{key} spans {end - begin} bytes where its shape needs {nbytes}")
    return TensorLocation(key, file, dtype, shape, start + begin, nbytes)


class ShardReader:
    """Reads tensors of a checkpoint by position, so that no page of a shard stays mapped.

    Use as a context manager. Reads from several threads are safe.
    """

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._descriptors: dict[Path, int] = {}
        self._files = files

    def __enter__(self) -> ShardReader:
        for file in self._files:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read_into(self, target: torch.Tensor, location: TensorLocation, first: int = 0) -> None:
        """Fill a contiguous tensor of the location's dtype with its elements from number ``first`` on."""
        view = memoryview(target.view(-1).view(torch.uint8).numpy().data)
        offset = location.offset + first * location.dtype.itemsize
        while view:
            count = os.preadv(self._descriptors[location.file], [view], offset)
            if count == 0:
                raise CheckpointError(f"{location.file}: ends inside {location.key}; download the file again.")
            view, offset = view[count:], offset + count
