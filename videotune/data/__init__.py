"""Files on disk become a library of clips and windows.

This package imports no torch.
"""
