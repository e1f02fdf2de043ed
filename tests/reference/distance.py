"""How far two runs of one model lie apart, and how far they may."""

import numpy as np

TOLERANCE = 2e-5
"""Largest difference allowed, as a share of the largest value of the array. transformers in chunks or token by token is up to 7.2e-6 from
its own whole forward (float32, all cases); rounding A_log to bfloat16 makes 7e-4 and more, scaling one kind of norm by 1.001 makes 3e-4 and more."""


def distance(found, expected):
    """Largest difference of each array of `expected` (name -> array) as a share of the array's largest value; NaN where one is not finite."""
    result = {}
    for name, array in expected.items():
        if found[name].shape != array.shape:
            raise ValueError(f"{name}: expected {array.shape}, found {found[name].shape}")
        result[name] = float(np.abs(found[name] - array).max() / np.abs(array).max())
    return result


def faults(distances, tolerance=TOLERANCE):
    """What is not within the tolerance, as a list of sentences."""
    beyond = {name: value for name, value in distances.items() if not value <= tolerance}
    return [f"{name} differs by {value:.1e} of its largest value, allowed are {tolerance:.0e}" for name, value in beyond.items()]
