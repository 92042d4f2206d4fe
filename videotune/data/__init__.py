"""Files on disk become a library of clips and windows; this package knows no model and imports no torch."""
