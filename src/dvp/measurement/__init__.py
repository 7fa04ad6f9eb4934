"""Measurements at a fixed policy: one engine, one model, no training."""
