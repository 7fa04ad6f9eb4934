"""From a run's checkpoint to a Hugging Face model, with the proof that it is the same one."""
