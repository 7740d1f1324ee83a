"""Which value of its metric counts as reached, task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedexp.errors import unknown_name
from fedexp.experiments.spec import checked_target
from fedexp.experiments.values import convert
from fedexp.report.gather import Section


@dataclass(frozen=True)
class Targets:
    """Targets that the user has named; without one, a task's own counts."""

    general: float | None = None
    by_task: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Targets:
        """From `VALUE`, for all tasks, or `TASK=VALUE`.

        >>> Targets.parse(["digits=0.9", "84"])
        Targets(general=84.0, by_task={'digits': 0.9})
        """
        general, by_task = None, {}
        for text in texts:
            task, equals, value = text.rpartition("=")
            number = convert(value, float, "--target")
            if equals:
                by_task[task] = number
            else:
                general = number
        return cls(general, by_task)

    def check(self, sections: Sequence[Section]) -> None:
        """A target of a task that has no run is a mistake."""
        known = {section.task for section in sections}
        for name in self.by_task:
            if name not in known:
                raise unknown_name("task of --target", name, known)

    def of(self, section: Section, metric: str) -> float | None:
        """The target of a section's metric, where there is one."""
        named = self.by_task.get(section.task, self.general)
        if named is not None:
            return checked_target(named, metric, "--target")
        known = section.runs[0].environment
        return known.get("target") if known.get("metric") == metric else None
