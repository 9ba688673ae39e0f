"""The page at `/`, and the description of the API at `/docs`: plain files, without a build step."""
