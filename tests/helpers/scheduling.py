"""Scheduling for pytest-xdist: tests that share processes or files run in one worker.

xdist has the mark `xdist_group` for this, but does not see it under pytest 9.2.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

ONE_WORKER = (
    "tests/docs/test_site.py",  # builds the site once
    "tests/engine/test_zoo.py",  # compares with runs of the loop that it stores
    "tests/flower/deploy/test_deployment.py",
    "tests/distributed/test_failed_jobs.py",
    "tests/distributed/test_many_runs.py",
    "tests/distributed/test_ranks_agree.py",
    "tests/tools/test_documents.py",  # builds all files of the archive once
)


class GroupedScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Distribute tests one by one, except for the folders and files in `ONE_WORKER`."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in ONE_WORKER if nodeid.startswith(folder)), nodeid)
