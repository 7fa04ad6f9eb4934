"""The mathematics of the method as pure functions of tensors: torch only, no framework, no state."""
