"""Files on disk become a Library of clips and windows; this room knows no model, and imports neither torch nor PyAV."""
