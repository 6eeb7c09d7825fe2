"""Values in, values out, for every package: errors, signals, whole files, the console, sections."""
