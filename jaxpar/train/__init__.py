"""The built-in trainer: a config becomes a run; `python -m jaxpar.train`."""
