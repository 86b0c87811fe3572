"""Watching a run: metrics and events while it goes on, progress in a terminal, the summary and the report."""
