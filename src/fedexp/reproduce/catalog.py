"""The studies by name: what `fedexp reproduce` offers."""

from __future__ import annotations

from fedexp.reproduce import (
    averaging,
    epsilon,
    figure1,
    long_run,
    momentum,
    scaffold,
    synthetic,
    table1,
    toy,
)
from fedexp.reproduce.study import Study

STUDIES: dict[str, Study] = {
    module.STUDY.name: module.STUDY
    for module in (
        toy,
        synthetic,
        figure1,
        table1,
        averaging,
        epsilon,
        long_run,
        scaffold,
        momentum,
    )
}
