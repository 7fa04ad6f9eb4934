"""Comparison of two answers to a problem: `comparison.equal(reference, answer)`. It needs only the errors of dvp."""
