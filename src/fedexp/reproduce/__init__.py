"""The paper's tables and figures from runs of this package: the studies of `fedexp reproduce`."""

from fedexp.reproduce import accuracy_studies, averaging, figure1, synthetic, toy
from fedexp.reproduce.study import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        toy.STUDY,
        synthetic.STUDY,
        figure1.STUDY,
        accuracy_studies.TABLE1,
        averaging.STUDY,
        accuracy_studies.EPSILON_TABLE,
        accuracy_studies.LONG_RUN,
        accuracy_studies.SCAFFOLD_EXP,
        accuracy_studies.MOMENTUM,
    )
}
"""The studies of the paper by name, as `fedexp reproduce --list` prints them."""

__all__ = ["STUDIES", "Study"]
