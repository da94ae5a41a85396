"""Keeping the records of a benchmark in the catalog as they are measured, whatever ends it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from importlib.metadata import version
from typing import Any

from engine.errors import FinemoeError
from engine.profiles import MachineIdentity
from engine.source import ModelSource
from finemoe_cli.console import note
from finemoe_cli.interrupts import Interruptible
from finemoe_cli.settings import Settings
from store.bench_runs import BenchRecord, BenchRuns
from store.catalog import Catalog, RunStatus

_VERSIONS = ("finemoe", "torch", "transformers")


class BenchKeeper:
    """One run of a benchmark.

    Attributes:
        ended_by: what ended the measurement before its time; None if nothing did.
    """

    def __init__(
        self,
        settings: Settings,
        source: ModelSource,
        machine: MachineIdentity,
        dataset: str,
        options: Mapping[str, Any],
    ) -> None:
        """``options``: the command's, as given."""
        self._settings = settings
        self._source = source
        self._machine = machine
        self._dataset = dataset
        self._options = dict(options)
        self._versions = {"python": platform.python_version(), **{name: version(name) for name in _VERSIONS}}
        self.ended_by: BaseException | None = None

    def identity(self, device: str, seed: int | None) -> dict[str, Any]:
        """What the records of the run share."""
        return {
            "model": self._source.name,
            "fingerprint": self._source.fingerprint.digest,
            "device": device,
            "dtype": self._machine.dtype,
            "machine": self._machine.describe(),
            "dataset": self._dataset,
            "seed": seed,
            **{f"{name}_version": number for name, number in self._versions.items()},
            "options": self._options,
        }

    def keep(
        self, measured: Generator[BenchRecord, None, None], interrupt: Interruptible, failed: Callable[[], bool]
    ) -> Iterator[dict[str, Any]]:
        """Yield each record once the catalog holds it; ``failed`` tells at the end whether they are as they should be.

        A Ctrl-C and a FinemoeError end the records and are kept in ``ended_by``.
        """
        catalog = Catalog.open(self._settings.home_folder, self._settings.catalog_url.value)
        with closing(catalog), interrupt:
            kept = BenchRuns(catalog)
            run = kept.begin(
                self._source.fingerprint,
                self._source.name,
                self._machine,
                self._dataset,
                self._options,
                self._versions,
            )
            status: RunStatus = "interrupted"
            try:
                with closing(measured) as records:
                    for record in records:
                        kept.add(run, record)
                        yield {"run": run, **record.to_dict()}
                status = "failed" if failed() else "finished"
            except KeyboardInterrupt as pressed:
                self.ended_by = pressed
            except FinemoeError as error:
                status, self.ended_by = "failed", error
            except Exception:
                status = "failed"
                raise
            finally:
                kept.finish(run, status)
                note(f"kept: finemoe bench show {run[:12]}")
