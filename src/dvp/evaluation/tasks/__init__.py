"""lm-eval task files; each is a YAML file over _math.yaml, graded by utils.py."""
