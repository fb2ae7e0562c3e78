"""Writes the largest page that the browser check looks at: eight configurations, three workloads, three levels, 26 prompts."""
from __future__ import annotations

import pathlib
import sys

import measure_speculative as ms
from tests import synthetic_records as made

if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(ms.report_page(made.notebook(), made.runs()), encoding="utf-8")
