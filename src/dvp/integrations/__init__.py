"""Adapters that bring the method into other programs; each module needs its program installed."""
