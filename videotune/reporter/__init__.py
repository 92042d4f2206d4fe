"""The report: read a run folder and write it as one self-contained HTML page."""
