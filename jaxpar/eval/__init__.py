"""Evaluate a run's checkpoint on held-out text: `python -m jaxpar.eval RUN`."""
