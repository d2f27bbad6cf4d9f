"""Pages rendered from a study's JSON and from nothing else: one file, no network, dark and light, wide and narrow."""

from mercer.studies.report.page import render, write_page

__all__ = ["render", "write_page"]
