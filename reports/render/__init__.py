"""One module for each form that a report takes."""
