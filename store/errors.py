"""Errors of the expert-map database."""

from __future__ import annotations

from engine.errors import FinemoeError, UsageError


class StoreError(FinemoeError):
    """The expert-map store cannot be opened, read or written."""


class StoreNotFoundError(UsageError):
    """No store exists at the given place."""


class BenchRunNotFoundError(UsageError):
    """No benchmark of that name is in the catalog, or several are."""


class StoreMismatchError(UsageError):
    """The store belongs to another model than the one in hand."""


class StoreLockedError(StoreError):
    """Another process has held the store's lock for too long."""


class StoreFullError(StoreError):
    """The disk is full; what was committed before stays."""


class ProfileError(StoreError):
    """A profile in the catalog is damaged, or of a release that kept other things."""


class InvalidMapError(StoreError):
    """An expert map or embedding that no cosine can be taken of: zero, not finite, or of the wrong shape."""


class CatalogVersionError(StoreError):
    """A later finemoe has migrated the catalog; this one does not know its tables."""
