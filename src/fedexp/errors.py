"""Errors. Each message is one line and names the remedy, or a front end adds it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any, ClassVar


class FedExPError(Exception):
    """Base of every error this package raises on purpose."""


class UsageError(FedExPError, ValueError):
    """An argument, option or data set that cannot be used as given."""


class DivergedError(FedExPError, ArithmeticError):
    """The model or its loss left the range of sensible numbers."""

    def __init__(
        self,
        round: int,
        what: str,
        remedy: str = "lower the local or server learning rate, or set local.clip_norm",
    ) -> None:
        super().__init__(f"diverged at round {round}: {what}; {remedy}")
        self.round, self.what, self.remedy = round, what, remedy

    def __reduce__(self) -> tuple[type[DivergedError], tuple[int, str, str]]:
        return type(self), (self.round, self.what, self.remedy)  # for pickle


class EngineError(FedExPError):
    """An engine cannot train this model as the loop does."""


class ReasonError(FedExPError):
    """An error whose remedy depends on the front end: a command, a call or a strategy.

    A front end adds the remedy that it has for the kind, see `remedies`.

    Attributes:
        kind: of the remedy.
        reason: the cause, in one line.
    """

    kind: ClassVar[str]

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason, remedy)
        self.reason = reason

    def __str__(self) -> str:
        return "; ".join(filter(None, self.args))


class DamagedError(ReasonError, UsageError):
    """A stored file is not as it was written."""

    kind = "damaged"


class OtherContentError(ReasonError, UsageError):
    """The folder holds a run of the same name but of other content."""

    kind = "content"


class LockError(ReasonError, UsageError):
    """The system or the file system has no file locks."""

    kind = "lock"


class NotDeterministicError(ReasonError, UsageError):
    """An operation of the model is not deterministic on this device."""

    kind = "deterministic"


class WorkerDiedError(ReasonError):
    """A worker process died."""

    kind = "worker"


_has_front_end = ContextVar("has_front_end", default=False)


@contextmanager
def remedies(by_kind: Mapping[str, str]) -> Iterator[None]:
    """Add a front end's remedies to errors that are raised in this block; the outermost counts."""
    if _has_front_end.get():
        yield
        return
    token = _has_front_end.set(True)
    try:
        yield
    except ReasonError as error:
        error.args = (error.reason, by_kind.get(error.kind, ""))
        raise
    finally:
        _has_front_end.reset(token)


class NonFiniteUpdateWarning(UserWarning):
    """A client's update was not finite and has been left out of the round."""


class DataNote(UserWarning):
    """Data were cast, or a loss or option is used in another way than expected: nothing to do."""


class EngineWarning(UserWarning):
    """A faster engine is not used for this model, or for a part of it, for the reason given."""


def whole_number(name: str, value: Any, least: int) -> int:
    """Return a whole number, of numpy or not, that is at least `least`; refuse anything else.

    >>> whole_number("rounds", 3, least=1)
    3
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    require(whole, f"{name} must be a whole number: {value!r}")
    require(value >= least, f"{name} must be at least {least}, not {value}")
    return int(value)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number, of numpy or not; texts and booleans are not.

    >>> is_number(0.5), is_number("0.5"), is_number(float("nan"))
    (True, False, False)
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # 10**400
        return False


def require(condition: bool, message: str, kind: type[UsageError] = UsageError) -> None:
    """Raise `kind(message)` unless `condition` holds."""
    if not condition:
        raise kind(message)


def shown(value: object, longest: int = 80) -> str:
    """Return a foreign value for a message: one line, printable, and not too long.

    >>> shown("a\\nb"), shown(3), len(shown("x" * 1000))
    ('a?b', '3', 80)
    """
    text = "".join(c if c.isprintable() else "?" for c in str(value)[: longest + 1])
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none.

    >>> first_line(ValueError("no\\nyes")), first_line(ValueError())
    ('no', 'ValueError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_name(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise the error of `unknown_name` unless the name is known."""
    if name not in known:
        raise unknown_name(kind, name, known)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown name, with the nearest known names, or else all of them.

    >>> print(unknown_name("algorithm", "fedxp", ["fedavg", "fedexp"]))
    unknown algorithm 'fedxp'; did you mean fedexp?
    >>> print(unknown_name("algorithm", "FedExP", ["fedexp", "fedexp-m"]))
    unknown algorithm 'FedExP'; did you mean fedexp?
    >>> print(unknown_name("task", "zzz", ["toy", "digits"]))
    unknown task 'zzz'; choose from digits, toy
    """
    names = sorted(known)
    folded = {candidate: candidate.casefold() for candidate in names}
    close = difflib.get_close_matches(name.casefold(), folded.values(), n=3, cutoff=0.6)
    if name.casefold() in close:
        close = [name.casefold()]
    near = [n for text in dict.fromkeys(close) for n in names if folded[n] == text]
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(names)}"
    return UsageError(f"unknown {kind} {name!r}; {hint}")
