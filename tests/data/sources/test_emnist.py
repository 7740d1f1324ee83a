"""Federated EMNIST from HDF5 and from LEAF's JSON."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from fedexp.data.datasets import load
from fedexp.data.sources.emnist import as_bytes, hdf5_split
from fedexp.errors import UsageError

Write = Callable[[Path], dict[str, Any]]


@pytest.mark.parametrize("layout", ["emnist", "leaf"])
def test_both_layouts_give_the_same_arrays(
    layout: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = request.getfixturevalue(f"write_{layout}")(tmp_path)
    for _ in range(2):  # from the files, and from the cache
        raw = load("emnist", tmp_path)
        for split, batch in (("train", raw.train), ("test", raw.test)):
            np.testing.assert_array_equal(batch["x"], expected[f"{split}_x"])
            np.testing.assert_array_equal(batch["y"], expected[f"{split}_y"])
        assert raw.offsets is not None
        assert raw.offsets.tolist() == expected["offsets"].tolist()
    assert raw.train["x"].dtype == torch.uint8


def test_without_h5py_the_error_names_the_remedy(
    tmp_path: Path, write_emnist: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_emnist(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    check_refused(tmp_path, "fed_emnist_train.h5", "needs h5py: pip install 'fedexp[data]'")


def test_each_writer_is_a_client(tmp_path: Path, write_emnist: Write) -> None:
    write_emnist(tmp_path)
    raw = load("emnist", tmp_path)
    federation = raw.federation()
    assert federation.sizes.tolist() == [12, 3, 1, 7, 2]  # in the order of the writers' names
    assert federation.fields["x"].data_ptr() == raw.train["x"].data_ptr()


def test_a_writer_may_be_in_one_split_only(tmp_path: Path, write_emnist: Write) -> None:
    write_emnist(tmp_path)
    with h5py.File(tmp_path / "fed_emnist_train.h5", "a") as file:
        group = file.create_group("examples/f0_00")
        group["pixels"], group["label"] = np.ones((0, 28, 28), np.float32), np.zeros(0, np.int32)
    assert load("emnist", tmp_path).federation().sizes.tolist() == [12, 3, 1, 7, 2]


def test_leaf_files_may_be_in_leafs_own_folder(tmp_path: Path, write_leaf: Write) -> None:
    write_leaf(tmp_path / "somewhere")
    (tmp_path / "femnist").mkdir()
    (tmp_path / "somewhere" / "femnist").rename(tmp_path / "femnist" / "data")
    assert load("emnist", tmp_path).federation().clients == 5


def test_a_writer_may_be_in_several_leaf_files(tmp_path: Path, write_leaf: Write) -> None:
    expected = write_leaf(tmp_path)
    path = next((tmp_path / "femnist" / "train").glob("all_data_0_*.json"))
    content = json.loads(path.read_text())
    again = {"user_data": {"f0_14": content["user_data"]["f0_14"], "f9_99": GOOD}}
    path.with_name("all_data_9.json").write_text(json.dumps(again))
    raw = load("emnist", tmp_path)
    assert raw.federation().sizes.tolist() == [12, 6, 1, 7, 2, 1]
    own = expected["train_y"][12:15].tolist()
    assert raw.federation().client(1)["y"].tolist() == own + own
    np.testing.assert_array_equal(raw.train["x"][12:15], expected["train_x"][12:15])
    np.testing.assert_array_equal(raw.train["x"][15:18], expected["train_x"][12:15])


def test_bytes_survive_division_by_255() -> None:
    grey = np.resize(np.arange(256, dtype=np.uint8), (1, 1, 28, 28))
    np.testing.assert_array_equal(as_bytes(grey.astype(np.float32) / 255, "here"), grey)
    np.testing.assert_array_equal(as_bytes((grey / 255).tolist(), "here"), grey)


def test_pixels_are_read_one_writer_at_a_time(tmp_path: Path, write_emnist: Write) -> None:
    write_emnist(tmp_path)
    split = hdf5_split(tmp_path / "fed_emnist_train.h5")
    assert [len(block) for block in split.pixels] == split.sizes == [12, 3, 1, 7, 2]


def without(name: str) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        del file[name]

    return change


def with_value(name: str, value: float) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        file[name][0] = value

    return change


def too_short(file: Any) -> None:
    del file["examples/f0_02/label"]
    file["examples/f0_02/label"] = np.zeros(3, np.int32)


def instead(name: str, value: Any) -> Callable[[Any], None]:
    """Return a change that replaces an entry by an array, or by a group for None."""

    def change(file: Any) -> None:
        del file[name]
        if value is None:
            file.create_group(name)
        else:
            file[name] = value

    return change


def emptied(file: Any) -> None:
    for writer in file["examples"]:
        instead(f"examples/{writer}/pixels", np.ones((0, 28, 28), np.float32))(file)
        instead(f"examples/{writer}/label", np.zeros(0, np.int32))(file)


FIRST = "examples/f0_02"
TEXT = np.full((12, 28, 28), b"0.5")
BAD = {
    "examples is an array": (instead("examples", np.zeros(3)), "has no group 'examples'"),
    "a writer is an array": (instead(FIRST, np.zeros(3)), f"writer /{FIRST} has no 'pixels'"),
    "pixels is a group": (instead(f"{FIRST}/pixels", None), f"writer /{FIRST} has no 'pixels'"),
    "label is a group": (instead(f"{FIRST}/label", None), f"writer /{FIRST} has no 'label'"),
    "pixels of text": (instead(f"{FIRST}/pixels", TEXT), "has pixels of |S3, not floats"),
    "pixels of bytes": (
        instead(f"{FIRST}/pixels", np.ones((12, 28, 28), np.uint8)),
        "has pixels of uint8, not floats",
    ),
    "pixels of nothing": (instead(f"{FIRST}/pixels", h5py.Empty("f4")), "pixels of shape None"),
    "label of text": (instead(f"{FIRST}/label", [b"1"] * 12), "not a list of whole numbers"),
    "label of fractions": (instead(f"{FIRST}/label", np.ones(12)), "not a list of whole numbers"),
    "label of nothing": (instead(f"{FIRST}/label", h5py.Empty("i4")), "label of shape None"),
    "no writers": (instead("examples", None), "has no examples"),
    "empty writers": (emptied, "has no examples"),
    "no examples": (without("examples"), "has no group 'examples'"),
    "no pixels": (without("examples/f1_09/pixels"), "writer /examples/f1_09 has no 'pixels'"),
    "no label": (without("examples/f1_09/label"), "writer /examples/f1_09 has no 'label'"),
    "label out of range": (with_value("examples/f0_02/label", 62), "label 62 of example 0 is out"),
    "not grey": (with_value("examples/f0_02/pixels", 1.5), "not all between 0 and 1"),
    "not a number": (with_value("examples/f0_02/pixels", np.nan), "not all between 0 and 1"),
    "too few labels": (too_short, "has 3 labels and pixels of shape (12, 28, 28)"),
}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_hdf5_file_is_named_and_leaves_no_cache(
    what: str, split: str, tmp_path: Path, write_emnist: Write
) -> None:
    write_emnist(tmp_path)
    change, message = BAD[what]
    with h5py.File(tmp_path / f"fed_emnist_{split}.h5", "a") as file:
        change(file)
    check_refused(tmp_path, f"fed_emnist_{split}.h5", message)


def check_refused(folder: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load("emnist", folder)
    line = str(caught.value)
    assert name in line
    assert message in line
    assert "\n" not in line
    assert not (folder / "cache").exists() or list((folder / "cache").iterdir()) == []


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.9])
def test_a_truncated_hdf5_file_is_named(keep: float, tmp_path: Path, write_emnist: Write) -> None:
    write_emnist(tmp_path)
    path = tmp_path / "fed_emnist_test.h5"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    check_refused(tmp_path, "fed_emnist_test.h5", "damaged HDF5 file")


GOOD = {"x": [[1.0] * 784], "y": [3]}
BAD_LEAF = {
    "truncated": ('{"users": ["a"], "user_da', "damaged JSON file"),
    "no writers": ('{"users": []}', "has no 'user_data'"),
    "a list": ("[1, 2]", "has no 'user_data'"),
    "no x": (json.dumps({"user_data": {"a": {"y": [1]}}}), "has no 'user_data'"),
    "too narrow": (json.dumps({"user_data": {"a": {"x": [[1.0]], "y": [1]}}}), "not 784 numbers"),
    "label": (json.dumps({"user_data": {"a": {**GOOD, "y": [-1]}}}), "label -1 of example 0"),
    "empty": (json.dumps({"user_data": {"a": {"x": [], "y": []}}}), "has no examples"),
}


@pytest.mark.parametrize("what", BAD_LEAF)
def test_a_bad_leaf_file_is_named_and_leaves_no_cache(what: str, tmp_path: Path) -> None:
    content, message = BAD_LEAF[what]
    for split, text in (("train", json.dumps({"user_data": {"a": GOOD}})), ("test", content)):
        (tmp_path / "femnist" / split).mkdir(parents=True)
        (tmp_path / "femnist" / split / f"all_data_{split}.json").write_text(text)
    check_refused(tmp_path, "all_data_test.json", message)


def test_the_real_data(real_folder: Callable[[str], Path]) -> None:
    raw = load("emnist", real_folder("emnist"))
    federation = raw.federation()
    assert federation.clients >= 100
    assert federation.sizes.min() >= 1
    assert raw.train["x"].shape[1:] == (1, 28, 28)
    assert 0 <= int(raw.train["y"].min()) <= int(raw.train["y"].max()) == 61
    assert raw.train["x"][:, 0, 0, 0].median() == 255  # white paper
    assert torch.bincount(raw.train["y"], minlength=62).min() > 0
