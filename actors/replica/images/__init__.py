"""Models that make images: mlx-vlm's pipelines, one image at a time, in steps between which requests come and go."""
