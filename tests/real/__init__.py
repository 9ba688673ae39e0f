"""Real checkpoints, served as they are served to everybody and compared with mlx-lm itself: `make test-real`."""
