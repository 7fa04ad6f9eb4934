"""MLflow around every stage, fed from files.

A stage writes what is to be tracked into a small record of its own (record.py); the store is made equal to records and
metrics.jsonl, while the stage runs (stage.py) or afterwards by `dvp track` (store.py does both). So a store that is
locked, gone or empty costs nothing but time.
"""
