"""Fitted predictors in the catalog: one of a name for a model and a store, or for a model alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from engine.fingerprint import ModelFingerprint
from store import entities
from store.catalog import Catalog, add_model


def save_predictor(
    catalog: Catalog,
    fingerprint: ModelFingerprint,
    model_name: str,
    name: str,
    settings: Mapping[str, Any],
    parameters: bytes,
    store_pk: int | None = None,
) -> None:
    """Keep fitted parameters in the place of earlier ones of the same name, in one transaction.

    Args:
        settings: what can be said as JSON.
        store_pk: the cataloged store they were fitted on; None for recordings that are no store.
    """

    def work(session: Session) -> None:
        add_model(session, fingerprint, model_name)
        session.flush()
        place = {"model_digest": fingerprint.digest, "store_pk": store_pk, "name": name}
        session.execute(delete(entities.Predictor).filter_by(**place))
        session.add(entities.Predictor(**place, settings=dict(settings), parameters=parameters))

    catalog.transact(work)


def load_predictor(
    catalog: Catalog, fingerprint: ModelFingerprint, name: str, store_pk: int | None = None
) -> tuple[dict[str, Any], bytes] | None:
    """Settings and parameters of the latest predictor of a name; None where there is none."""

    def work(session: Session) -> tuple[dict[str, Any], bytes] | None:
        chosen = select(entities.Predictor).filter_by(model_digest=fingerprint.digest, name=name, store_pk=store_pk)
        found = session.scalar(chosen.order_by(entities.Predictor.id.desc()).limit(1))
        return None if found is None else (found.settings, found.parameters)

    return catalog.transact(work)
