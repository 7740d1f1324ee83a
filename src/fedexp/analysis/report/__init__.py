"""`fedexp report`: run folders as one page that works offline, and as static figures."""

from fedexp.analysis.report.filters import Filters
from fedexp.analysis.report.page import Report, write_report
from fedexp.analysis.report.sections import Targets

__all__ = ["Filters", "Report", "Targets", "write_report"]
