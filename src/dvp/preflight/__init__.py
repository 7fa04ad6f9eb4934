"""The whole path of a run, tried in minutes before the grid is trained."""
