"""What a step shall be: values, decisions and previews. No torch."""
