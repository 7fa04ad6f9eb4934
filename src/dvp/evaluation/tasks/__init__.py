"""lm-eval task files: math.yaml, graded by utils.py, for every task that has none of its own name."""
