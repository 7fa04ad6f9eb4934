"""The method inside other programs: each module needs its program installed, and is imported only when asked for."""
