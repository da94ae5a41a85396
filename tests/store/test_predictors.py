"""Fitted predictors in a catalog on a real SQLite file."""

from __future__ import annotations

from pathlib import Path

from engine.predictors.fitting import fit_predictors
from engine.predictors.packing import pack_predictors, unpack_predictors
from store.catalog import Catalog
from store.predictors import load_predictor, save_predictor
from tests.engine.sample_traces import sample_trace
from tests.store.samples import make_fingerprint

MODEL = make_fingerprint()


def test_the_latest_predictor_of_a_name_comes_back(tmp_path: Path) -> None:
    catalog = Catalog.open(tmp_path)
    packed = pack_predictors(fit_predictors(sample_trace(3, 8)))
    assert load_predictor(catalog, MODEL, "adaptive") is None
    save_predictor(catalog, MODEL, "tiny", "adaptive", {"discount": 0.5}, b"earlier")
    save_predictor(catalog, MODEL, "tiny", "adaptive", {"discount": 0.75}, packed)
    save_predictor(catalog, MODEL, "tiny", "another", {}, b"")
    found = load_predictor(catalog, MODEL, "adaptive")
    catalog.close()
    assert found is not None
    settings, parameters = found
    assert settings == {"discount": 0.75}
    assert unpack_predictors(parameters).knowledge.top_k == 2
