"""A study file or arms to race in; registered runs and a verdict out."""
