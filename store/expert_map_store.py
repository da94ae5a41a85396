"""The store of one model's expert maps: a resident index to search, a durable log, and a catalog of runs."""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from engine.errors import UsageError
from engine.fingerprint import ModelFingerprint
from engine.records import IterationRecord
from store.catalog import Catalog, CatalogedStore, LoggedBatch, Run, RunStatus
from store.errors import StoreError, StoreMismatchError, StoreNotFoundError
from store.index import DEFAULT_CAPACITY, DEFAULT_DISTANCE, PrefixScan, ResidentIndex
from store.locations import StoreLocation, locate, stores_folder
from store.maps import MapTable
from store.rows import round_records
from store.schema import LoggedMap, StoreDescription
from store.statistics import Origin, StoreStatistics, gather_statistics
from store.write_buffer import FlushReport, PendingBatch, WriteBuffer

MOST_MAPS = 2**31 - 1
"""The largest capacity that the integer columns of every database hold."""


class ExpertMapStore:
    """Expert maps that persist; implements ``engine.records.ExpertMapLibrary``.

    ``publish`` and the searches touch memory only and belong to one thread, the matcher's; ``flush`` and the
    rest may be called from another one meanwhile.

    Attributes:
        prompt_hashes: of the prompts whose maps were there on opening.
    """

    def __init__(
        self,
        table: MapTable,
        catalog: Catalog,
        entry: CatalogedStore,
        model: ModelFingerprint,
    ) -> None:
        """Load the log into memory and account for the batches that a crash left out of the catalog."""
        description = table.description
        fingerprint = description.fingerprint
        self._table = table
        self._catalog = catalog
        self._entry = entry
        self._model = model
        self._index = ResidentIndex(
            fingerprint.layers,
            fingerprint.experts,
            fingerprint.hidden_size,
            entry.capacity,
            description.distance,
        )
        self._run: Run | None = None
        self._memory = threading.Lock()
        self._disk = threading.Lock()

        # The log is read before the catalog: a batch committed in between is then known, not adopted.
        log = table.scan()
        batches = Counter(zip(log.batch_ids, log.run_ids, strict=True))
        catalog.adopt(entry.pk, model.digest, {batch: LoggedBatch(run, rows) for (batch, run), rows in batches.items()})
        self._origins = {
            key: Origin(run_id, phase)
            for key, run_id, phase in zip(log.rows.keys, log.run_ids, log.phases, strict=True)
        }
        self.prompt_hashes = frozenset(log.prompt_hashes)
        self._buffer = WriteBuffer(self._origins)
        for key in self._index.fill(log.rows):
            self._displace(key)

    @classmethod
    def open(
        cls,
        home: Path,
        fingerprint: ModelFingerprint,
        *,
        location: str | None = None,
        model_name: str = "",
        capacity: int | None = None,
        distance: int = DEFAULT_DISTANCE,
        create: bool = True,
        allow_mismatch: bool = False,
        catalog_url: str | None = None,
    ) -> ExpertMapStore:
        """Open a store of ``fingerprint``'s model with all its maps in memory.

        Args:
            home: finemoe's data folder.
            fingerprint: the model in hand.
            location: None for the model's own store, a bare name for another one of it, a path, or a URI.
            model_name: how users call the model; recorded with a new store.
            capacity: C from now on; None for the recorded one. Maps beyond it go, the most redundant first.
            distance: d of a new store; a store keeps its own.
            create: whether to create what is not there; if not, nothing at all is created.
            allow_mismatch: whether another model's store will do if L, J and h agree.
            catalog_url: SQLAlchemy URL of the catalog; None for the SQLite file in ``home``.

        Raises:
            StoreNotFoundError: no store is there and ``create`` is off, or its parent folder is missing.
            StoreMismatchError: the store belongs to another model.
            UsageError: the capacity or the distance is below 1, or the capacity is beyond any catalog's numbers.
            StoreError: log or catalog cannot be opened; see its subclasses.
        """
        if (capacity is not None and capacity < 1) or distance < 1:
            raise UsageError(f"store capacity {capacity} and prefetch distance {distance} must be at least 1")
        if capacity is not None and capacity > MOST_MAPS:
            raise UsageError(f"a store capacity of {capacity} is too much: give at most {MOST_MAPS:,}")
        place = locate(home, fingerprint.digest, location)
        wanted = StoreDescription(
            store_id=uuid.uuid4().hex,
            fingerprint=fingerprint,
            model_name=model_name,
            distance=min(distance, fingerprint.layers),
            capacity=capacity or DEFAULT_CAPACITY,
        )
        try:
            table = _open_table(home, place, wanted, create)
            _check_model(table, fingerprint, allow_mismatch)
            catalog = Catalog.open(home, catalog_url)
        except OSError as error:
            raise StoreError(
                f"{error.filename or place.uri}: {error.strerror}; finemoe needs folders it may write to, for the "
                f"store and for its catalog in {home}"
            ) from error
        try:
            entry = catalog.register(table.description, place.uri, fingerprint, capacity)
            return cls(table, catalog, entry, fingerprint)
        except BaseException:
            catalog.close()
            raise

    def __enter__(self) -> ExpertMapStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def description(self) -> StoreDescription:
        """What the store says of itself: its id, its model, d."""
        return self._table.description

    @property
    def location(self) -> str:
        """Folder or URI where it lies."""
        return self._table.location.uri

    @property
    def capacity(self) -> int:
        """C, the most maps it holds."""
        return self._index.capacity

    @property
    def pending(self) -> int:
        """Maps that the next flush writes; callers flush at a thousand, or when a run pauses."""
        return len(self._buffer)

    @property
    def index(self) -> ResidentIndex:
        """The maps in memory."""
        return self._index

    def semantic_scores(self, embeddings: np.ndarray) -> np.ndarray:
        """Cosine [B, n] of embeddings [B, h] with every stored one (paper equation 4)."""
        return self._index.semantic_scores(embeddings)

    def start_trajectory(self, batch: int) -> PrefixScan:
        """Begin a trajectory search for ``batch`` sequences over the maps present now."""
        return self._index.start_trajectory(batch)

    def probabilities(self, row: int) -> np.ndarray:
        """The stored map of one row, float32 [L, J]; read-only, valid until the next ``publish``."""
        return self._index.probabilities(row)

    def begin_run(
        self,
        kind: str,
        dataset: str | None = None,
        settings: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> Run:
        """Begin the run that the next maps belong to.

        Args:
            kind: "warm", "chat" or "bench".
            dataset: identity of the prompts, which changes when they do.
            settings: what the maps depend on, as JSON values.
            resume: go on where the run of the same store, kind, data set and settings left off: its id is
                derived from them, so that an iteration that is run again replaces its own earlier map.

        Raises:
            StoreError: another run of this store object has not been finished.
        """
        if self._run is not None:
            raise StoreError(f"run {self._run.id} has to be finished before another one begins")
        chosen = dict(settings or {})
        run_id = uuid.uuid4().hex
        if resume:
            identity = [self.description.store_id, self._model.digest, kind, dataset, chosen]
            run_id = _digest(json.dumps(identity, sort_keys=True))
        self._run = self._catalog.begin_run(self._entry.pk, run_id, kind, self._model.digest, dataset, chosen)
        return self._run

    def publish(
        self,
        records: Sequence[IterationRecord],
        semantic_scores: np.ndarray | None = None,
        trajectory_scores: np.ndarray | None = None,
    ) -> None:
        """Add finished iterations to the index and to the next flush; touches memory only.

        Raises:
            InvalidMapError: a record is zero, not finite or of the wrong shape; none is taken.
            StoreError: no run has begun.
        """
        run = self._run
        if run is None:
            raise StoreError("expert maps need a run to belong to: call begin_run before publish")
        fingerprint = self.description.fingerprint
        keys = [_digest(f"{run.id}/{record.sequence}/{record.iteration}") for record in records]
        rows = round_records(records, keys, fingerprint.layers, fingerprint.experts, fingerprint.hidden_size)
        created = datetime.now(UTC)
        with self._memory:
            displaced = self._index.insert(rows, semantic_scores, trajectory_scores)
            for i, (record, key, gone) in enumerate(zip(records, keys, displaced, strict=True)):
                if gone is not None:
                    self._displace(gone)
                # A map that is published again counts among the latest.
                self._origins.pop(key, None)
                self._origins[key] = Origin(run.id, record.phase)
                self._buffer.add(
                    LoggedMap(key, self._model.digest, run.id, record, rows.embeddings[i], rows.maps[i], created)
                )

    def flush(self, completed: int | None = None) -> FlushReport:
        """Make every map published so far durable, then the run's progress.

        Maps go to the log first, tagged with a batch; the maps they replaced leave it; one transaction then
        enters batch and progress into the catalog. A crash between the two is made good on the next opening.

        Args:
            completed: prompts of the run that are done, from its very beginning.

        Raises:
            StoreFullError: the disk is full; the maps stay pending.
            StoreError: the log or the catalog cannot be written; the maps stay pending.
        """
        with self._disk:
            with self._memory:
                batch = self._buffer.take()
            try:
                self._account(batch, self._table.write(batch), completed)
            except BaseException:
                with self._memory:
                    self._buffer.restore(batch, lambda key: self._index.row_of(key) is not None)
                raise
            self._table.compact_if_due()
            return FlushReport(len(batch.maps), batch.replaced)

    def finish_run(self, status: RunStatus = "finished") -> Run:
        """Flush and close the run; a warmed store is compacted, for it will be read often.

        Raises:
            StoreError: no run has begun, or the log or the catalog cannot be written.
        """
        if self._run is None:
            raise StoreError("there is no run to finish")
        self.flush()
        run, self._run = self._catalog.finish_run(self._entry.pk, self._run, status), None
        if run.kind == "warm":
            self._table.compact()
        return run

    def close(self) -> None:
        """Flush; a run that was not finished is recorded as interrupted."""
        try:
            if self._run is not None:
                self.finish_run("interrupted")
        finally:
            self._catalog.close()

    def statistics(self) -> StoreStatistics:
        """Count, measure and compare what is in the store; reads the disk."""
        files = self._table.files()
        runs = self._catalog.runs(self._entry.pk)
        with self._memory:
            return gather_statistics(
                self.description, self._table.location.uri, files, runs, self._index, self._origins, self.pending
            )

    def _displace(self, key: str) -> None:
        del self._origins[key]
        self._buffer.displace(key)

    def _account(self, batch: PendingBatch, batch_id: str | None, completed: int | None) -> None:
        run = self._run
        if run is not None and (batch_id or batch.replaced or completed not in (None, run.completed)):
            self._run = self._catalog.commit(self._entry.pk, run, batch_id, len(batch.maps), batch.replaced, completed)


def _open_table(home: Path, place: StoreLocation, wanted: StoreDescription, create: bool) -> MapTable:
    try:
        return MapTable.open(place)
    except StoreNotFoundError:
        if not create:
            raise
        stores_folder(home).mkdir(parents=True, exist_ok=True)
        return MapTable.create(place, wanted)


def _check_model(table: MapTable, model: ModelFingerprint, allow_mismatch: bool) -> None:
    owner = table.description.fingerprint
    if owner == model or (allow_mismatch and owner.same_shape(model)):
        return
    raise StoreMismatchError(
        f"{table.location.uri}: the store belongs to {owner.describe()}, the model is {model.describe()}; "
        "give --store another place, or none"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
