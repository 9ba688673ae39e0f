"""The model's side of pictures, videos and audio: encoders, and what the language part gets of them."""
