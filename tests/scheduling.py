"""Which worker runs which test: those that share real processes go to one, all others anywhere.

xdist has a mark for that, `xdist_group`, which pytest 9.2 no longer lets it see.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

TOGETHER = (
    "tests/flower/deploy/",
    "tests/distributed/test_endings.py",
    "tests/distributed/test_many_runs.py",
    "tests/distributed/test_ranks_agree.py",
    "tests/tools/test_results_documents.py",  # all files of the archive are generated once
)


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """A test is a unit of work of its own, but for those that belong together."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid)
