"""What a step does: values, decisions and previews. No torch."""
