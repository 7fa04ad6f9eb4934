"""The whole path of a run, rehearsed in minutes before the grid is trained."""
