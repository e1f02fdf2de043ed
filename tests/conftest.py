"""What holds for every test: no silent promotion of dtype or rank. pyproject.toml makes warnings errors."""

import importlib.util

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A time limit for each example fails on a busy machine; on CI hypothesis' own profile, which this one extends, also fixes the seeds.
hypothesis.settings.register_profile("qjax", deadline=None)
hypothesis.settings.load_profile("qjax")

# The live comparison imports torch and transformers, which only the environment of `make reference` has.
collect_ignore = [] if importlib.util.find_spec("torch") else ["reference"]
