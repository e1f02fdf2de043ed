"""Measurements of the engine: what the machine can do, what a forward must do, and what the recipe for row purity costs."""
