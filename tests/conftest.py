"""Lets every test import the helper modules of this folder: pytest puts a conftest's folder on the path."""
