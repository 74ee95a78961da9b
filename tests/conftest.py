"""Eight simulated CPU devices for every test, chosen before jax is first imported."""

import os

DEVICES = 8

# XLA reads its flags once, when the first device is touched: later is too late.
_flags = [
    flag
    for flag in os.environ.get("XLA_FLAGS", "").split()
    if not flag.startswith("--xla_force_host_platform_device_count")
]
os.environ["XLA_FLAGS"] = " ".join([*_flags, f"--xla_force_host_platform_device_count={DEVICES}"])
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# The machines are shared: how long one example takes says nothing about the code.
hypothesis.settings.register_profile("shared", deadline=None)
hypothesis.settings.load_profile("shared")


@pytest.fixture(scope="module")
def x64():
    """Switch float64 on for one module's tests, and back to what it was afterwards."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
