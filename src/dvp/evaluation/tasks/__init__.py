"""lm-eval task files. A task without a file of its own name uses math.yaml, which is graded by utils.py."""
