"""The experiment as a user writes it: typed settings, the grid, reading the files, the folder of its results."""
