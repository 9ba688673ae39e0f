"""Models of speech: mlx-audio's, which write down speech or speak, one job at a time."""
