"""A model's processors of pictures, videos and audio: how many tokens media have in a prompt, and encoders' inputs."""
