"""What tests of a model at its load share: comparisons, work in pieces between requests, what earlier loads found."""
