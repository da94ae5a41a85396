"""Finding stores without knowing their models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from store.catalog import Catalog
from store.database import catalog_file
from store.errors import StoreError, StoreNotFoundError
from store.locations import locate, stores_folder
from store.maps import LogFiles, MapTable
from store.schema import StoreDescription


@dataclass(frozen=True, slots=True)
class StoreListing:
    """One store that was found.

    Attributes:
        location: folder or URI; ``ExpertMapStore.open`` takes it as it is.
        description: what the store says of itself; None if it cannot be read.
        files: its size; None if it cannot be read.
        problem: why it cannot be read, or None.
    """

    location: str
    description: StoreDescription | None
    files: LogFiles | None
    problem: str | None


def list_stores(home: Path, catalog_url: str | None = None) -> tuple[StoreListing, ...]:
    """Every store under ``home`` and every one the catalog knows of elsewhere; creates nothing.

    Raises:
        StoreError: the catalog cannot be opened.
    """
    locations = {str(folder.absolute()) for folder in stores_folder(home).glob("*")}
    if catalog_url is not None or catalog_file(home).is_file():
        catalog = Catalog.open(home, catalog_url)
        try:
            locations.update(catalog.locations())
        finally:
            catalog.close()
    listings = (find_store(home, location) for location in sorted(locations))
    return tuple(listing for listing in listings if listing is not None)


def find_store(home: Path, location: str) -> StoreListing | None:
    """The store at a path or URI, whatever its model; None where none is."""
    try:
        table = MapTable.open(locate(home, "", location))
        return StoreListing(location, table.description, table.files(), None)
    except StoreNotFoundError:
        return None
    except StoreError as error:
        return StoreListing(location, None, None, str(error))
