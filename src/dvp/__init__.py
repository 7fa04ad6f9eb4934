"""dvp: reproduce, check and extend Dynamic Vocabulary Pruning (arXiv 2512.23087)."""
