"""Tracking of every stage in MLflow, fed from files.

A stage writes what is to be tracked into a small record of its own (record.py). The store is then brought up to date
with records and metrics.jsonl, while the stage runs (stage.py) or afterwards by `dvp track`; store.py does both. If the
store is locked, gone or empty, nothing is lost: `dvp track` can fill it later.
"""
