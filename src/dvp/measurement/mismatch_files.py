"""The names under which dvp.measurement.mismatch writes and the report reads; apart, so that reports load no model."""

ENGINE = "engine"
SOURCES = (ENGINE, "shape", "bf16")
"""Whose distribution is q: the engine's, or the trainer's own in another batch shape or under bf16 autocast."""
TABLES = ("histogram", "gaps", "bounds", "safe_sets", "prefixes", "noise")
"""The parquet files of a measurement."""
