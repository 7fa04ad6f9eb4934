"""Preflight: a test in minutes of all that a training run does, before the grid is trained."""
