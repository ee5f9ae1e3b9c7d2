"""Measurements of batchgen beside other systems; see compare.py, and LOG.md for what was found."""
