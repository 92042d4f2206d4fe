"""The report: a run folder read back, and written down as one page that needs nothing but a browser."""
