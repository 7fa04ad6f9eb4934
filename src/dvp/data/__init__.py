"""Problems: where they come from, how they are cleaned, and how an answer is graded."""
