"""A recipe and values to try in; receipts of short runs, and a recipe that is stable, out."""
