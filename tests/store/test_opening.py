"""Opening a store: where it lies, whose it is, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.errors import UsageError
from store.errors import StoreError, StoreMismatchError, StoreNotFoundError
from store.listing import find_store, list_stores
from tests.store.samples import HIDDEN, LAYERS, contents, make_fingerprint, make_record, make_records, open_store, warm


def test_reopening_gives_the_same_index(tmp_path):
    before = warm(tmp_path, 40)
    with open_store(tmp_path, create=False) as store:
        assert len(store) == 40
        assert contents(store) == before
        again = make_record(17)
        assert store.semantic_scores(again.embedding[None]).argmax() == 17
        scan = store.start_trajectory(1)
        for layer in range(LAYERS):
            scores = scan.observe(again.probabilities[None, layer])
        assert scores.argmax() == 17
        np.testing.assert_allclose(store.probabilities(17), again.probabilities, atol=1e-3)


def test_another_models_store_is_refused_with_both_named(tmp_path):
    warm(tmp_path, 3, location=str(tmp_path / "shared"))
    other = make_fingerprint(weights_hash="w1")
    with pytest.raises(StoreMismatchError) as error:
        open_store(tmp_path, fingerprint=other, location=str(tmp_path / "shared"))
    assert make_fingerprint().describe() in str(error.value)
    assert other.describe() in str(error.value)
    assert "give --store another place" in str(error.value)
    with open_store(tmp_path, fingerprint=other, location=str(tmp_path / "shared"), allow_mismatch=True) as store:
        store.begin_run("chat")
        store.publish(make_records(2, first=50))
        assert len(store) == 5


@pytest.mark.parametrize("change", [{"layers": LAYERS + 1}, {"experts": 4}, {"hidden_size": HIDDEN * 2}])
def test_other_shapes_are_refused_whatever_is_allowed(tmp_path, change):
    warm(tmp_path, 3, location=str(tmp_path / "shared"))
    with pytest.raises(StoreMismatchError, match="the store belongs to"):
        open_store(
            tmp_path,
            fingerprint=make_fingerprint(**change),
            location=str(tmp_path / "shared"),
            allow_mismatch=True,
        )


def test_models_do_not_share_their_own_stores(tmp_path):
    warm(tmp_path, 3)
    with open_store(tmp_path, fingerprint=make_fingerprint(weights_hash="w1")) as store:
        assert len(store) == 0
    assert len(list_stores(tmp_path)) == 2


def test_names_paths_and_the_default_are_different_stores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    digest = make_fingerprint().digest
    for location, folder in [
        (None, home / "stores" / digest),
        ("code", home / "stores" / f"{digest}-code"),
        ("./code", tmp_path / "code"),
    ]:
        with open_store(home, location=location) as store:
            assert len(store) == 0
        warm(home, 2, location=location)
        assert (folder / "maps.lance").is_dir()


@pytest.mark.parametrize("location", [None, "code", "./code"])
def test_opening_what_is_not_there_creates_nothing(tmp_path, monkeypatch, location):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreNotFoundError):
        open_store(tmp_path / "home", location=location, create=False)
    assert list(tmp_path.iterdir()) == []
    assert list_stores(tmp_path / "home") == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"capacity": 0}, {"capacity": -5}, {"distance": 0}])
def test_nonsense_is_refused_before_anything_is_created(tmp_path, options):
    with pytest.raises(UsageError, match="at least 1"):
        open_store(tmp_path / "home", **options)
    assert not (tmp_path / "home").exists()


def test_a_capacity_no_catalog_can_hold_is_refused(tmp_path):
    with pytest.raises(UsageError, match="at most 2,147,483,647"):
        open_store(tmp_path / "home", capacity=2**31)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("location", [None, "x" * 300])
def test_a_place_the_system_refuses_is_named(tmp_path, location):
    (tmp_path / "file").write_text("")
    home = tmp_path / ("file" if location is None else "home")
    with pytest.raises(StoreError, match=r"(file|x)/?.*: (Not a directory|File name too long); finemoe needs folders"):
        open_store(home, location=location)
    with pytest.raises(StoreNotFoundError, match="no such user"):
        open_store(home, location="~no-such-user/store")


def test_a_distance_beyond_the_layers_is_the_layers(tmp_path):
    with open_store(tmp_path, fingerprint=make_fingerprint(layers=2)) as store:
        assert store.description.distance == 2


def test_listing_names_every_store_and_what_is_wrong_with_one(tmp_path):
    warm(tmp_path, 4, model_name="tiny")
    warm(tmp_path, 2, location=str(tmp_path / "apart"))
    broken = tmp_path / "stores" / "broken" / "maps.lance"
    broken.mkdir(parents=True)
    (broken / "_versions").mkdir()
    (broken / "_versions" / "1.manifest").write_bytes(b"nonsense")
    (tmp_path / "stores" / "empty").mkdir()
    listings = {Path(listing.location).name: listing for listing in list_stores(tmp_path)}
    digest = make_fingerprint().digest
    assert set(listings) == {digest, "apart", "broken"}
    assert listings[digest].description.model_name == "tiny"
    assert (listings[digest].files.rows, listings["apart"].files.rows) == (4, 2)
    assert listings["broken"].description is None
    assert "broken" in listings["broken"].problem


def test_a_store_is_found_by_its_path_whatever_its_model(tmp_path):
    warm(tmp_path, 4, location=str(tmp_path / "apart"))
    found = find_store(tmp_path / "home", str(tmp_path / "apart"))
    assert (found.description.fingerprint, found.files.rows) == (make_fingerprint(), 4)
    assert find_store(tmp_path / "home", str(tmp_path / "nowhere")) is None
    assert not (tmp_path / "nowhere").exists()
