"""What every room stands on: errors, signals, whole files, the console and the types of recipe
values."""
