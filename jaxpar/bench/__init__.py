"""Measurements of the built-in trainer; `python -m jaxpar.bench`."""
