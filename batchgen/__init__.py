"""batchgen: a table of prompts in, a table of answers out."""

__version__ = "0.1.0"
